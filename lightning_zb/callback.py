"""`ZeroBubbleCallback`: profile early steps, plan with what was measured, switch, keep an eye on drift and memory, report."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum, unique
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_zb import device_memory, reporting
from lightning_zb.callback_state import CallbackState, read_state, request_values, to_plain, why_not
from lightning_zb.deliberation import Deliberation
from lightning_zb.drift import find_drift
from lightning_zb.execution.pass_samples import StepKind, profiling_steps, running_steps
from lightning_zb.pipeline import Pipeline
from lightning_zb.plan_choice import Replan, needs_bytes
from lightning_zb.planning.budget import MemoryBudget
from lightning_zb.planning.plan import Plan
from lightning_zb.profile_window import Profile, ProfileWindow
from lightning_zb.replanning import Decision, LoggedDecision, decide, go_back, price_again, repriced
from lightning_zb.seen_costs import seen_profile
from lightning_zb.terms import make_terms


@unique
class _Purpose(Enum):
    """What the running window is for."""

    PROFILE = "profile"  # measure layers, links and memory; then plan
    VERIFY = "verify"  # see how the plan that was decided on does, and what its passes take
    CHECK = "check"  # look for drift


_NUM_VERIFY_STEPS = 5  # at full speed


class ZeroBubbleCallback(pl.Callback):
    """Measures the pipeline, plans again with true costs, switches, and reports; the strategy adds one where there is none.

    Rank 0 plans in a thread while training goes on; all ranks switch between the same two steps. They wait for each other
    between steps only at the end of a window of measured steps. Once the plan that was decided on runs, its passes are measured
    again: it is predicted with what they take by then, and where devices wait more than was planned, planning looks once more.
    Checkpoints hold the plan in force with what was measured, so a resumed run starts with it.

    Args:
        profile_steps: first step to measure and the first not to; None to measure nothing. The first of them counts bytes,
            the others take times.
        replan: what a new plan may change: `"off"`, `"order"`, `"partition"` or `"placement"`. Order is free; the
            others move parameters and optimizer state between devices once. None: the placement where the strategy's
            schedule is `"auto"` and its partition is not given, else the order.
        check_every: steps between checks for drift; 0 for none.
        drift_tolerance: share by which a chunk's measured seconds may leave those planned with.
        min_gain: share of a step's time that a new plan must save.
        plan_seconds: how long planning may take.
        background: whether training goes on while rank 0 plans; False where the step that switches must not depend on time.
        report: whether to write plan, costs, pictures and traces to the log directory.
    """

    def __init__(
        self,
        profile_steps: tuple[int, int] | None = (4, 13),
        replan: str | Replan | None = None,
        check_every: int = 200,
        drift_tolerance: float = 0.15,
        min_gain: float = 0.01,
        plan_seconds: float = 10.0,
        background: bool = True,
        report: bool = True,
    ) -> None:
        if profile_steps is not None and profile_steps[1] - profile_steps[0] < 2:
            raise ValueError(f"profile_steps={profile_steps} must hold two steps at least: one counts bytes, one takes times")
        try:
            self._replan = None if replan is None else Replan(replan)
        except ValueError:
            raise ValueError(f"replan={replan!r}; write one of {', '.join(repr(r.value) for r in Replan)}") from None
        self.profile_steps, self.check_every, self.report = profile_steps, check_every, report
        self.drift_tolerance, self.min_gain = drift_tolerance, min_gain
        self.plan_seconds, self.background = plan_seconds, background
        self.decisions: list[LoggedDecision] = []
        """All decisions since the fit began, and those before the checkpoint it goes on from; the same on every rank."""
        self.profile: Profile | None = None
        """What was measured last (rank 0)."""
        self.num_drifts = 0
        """How often drift was noticed."""
        self._request: dict[str, Any] = {}
        self._restored: CallbackState | None = None
        self._reset()

    def _reset(self) -> None:
        self._num_steps = 0
        self._window: ProfileWindow | None = None
        self._purpose = _Purpose.PROFILE
        self._deliberation: Deliberation | None = None
        self._may_think_again = False  # whether a plan may be looked for once more before layers are measured again
        self._budget: MemoryBudget = None  # that plans are to keep to, settled when layers were measured
        self._next_check = 0
        self._measured_plan: Plan | None = None
        self._priced: Plan | None = None  # on rank 0 the running plan with the costs measured last
        self._replaced: tuple[Plan, Profile] | None = None  # on rank 0 the plan before this one, and what it was measured to do
        self._recent: deque[float] = deque(maxlen=50)
        self._memory = device_memory.MemoryWatch()

    @property
    def replan(self) -> Replan:
        """What a plan with measured costs may change; nothing where nothing is measured. Settled once a run is set up."""
        if self.profile_steps is None:
            return Replan.OFF
        if self._replan is not None:
            return self._replan
        is_free = self._request.get("schedule") == "auto" and self._request.get("partition") in (None, "auto")
        return Replan.PLACEMENT if is_free else Replan.ORDER

    @property
    def is_busy(self) -> bool:
        """Whether steps are measured or a plan is looked for now, which takes a share of the host."""
        return self._window is not None or self._deliberation is not None

    # -- Lightning's calls -----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "is_between_steps"):
            raise TypeError(f'ZeroBubbleCallback needs Trainer(strategy="zero_bubble"), not {type(trainer.strategy).__name__}')
        request = trainer.strategy.plan_request
        self._request = request_values(request)
        if needs_bytes(request.memory_budget) and request.costs is None and self.profile_steps is None:
            raise ValueError(
                f"memory_budget={request.memory_budget!r} needs measured bytes: give ZeroBubbleCallback profile_steps, "
                "or the strategy costs=..., or write the budget as a multiple such as 1.0"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()
        self.profile, self.decisions, self.num_drifts = None, [], 0
        if self._restored is not None:
            self._take_over(trainer, self._restored)
            self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """The plan in force and what was measured, in plain values; nothing before the first measurement is over."""
        plan = self._measured_plan
        if plan is None:
            return {}
        return to_plain(CallbackState(plan, self._request, self.profile, tuple(self.decisions), self.num_drifts))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._restored = read_state(state_dict)

    def _take_over(self, trainer: Any, state: CallbackState) -> None:
        """Go on with a checkpoint's plan, if it is one for this run."""
        pipeline: Pipeline = trainer.strategy.pipeline
        refusal = why_not(pipeline.plan, state, pipeline.request)
        if refusal is not None:
            rank_zero_info(f"zero_bubble: the checkpoint's plan {refusal}; layers are measured again")
            return
        pipeline.switch(state.plan)
        self._measured_plan, self.profile = state.plan, state.profile if trainer.is_global_zero else None
        self._memory.peak_bytes = max(state.plan.predicted.peak_bytes if state.profile is None else state.profile.peak_bytes)
        self.decisions, self.num_drifts = list(state.decisions), state.num_drifts
        self._next_check = self.check_every
        rank_zero_info(f"zero_bubble: goes on with the checkpoint's plan, {state.plan.planner.name}, and its measured costs")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        if not strategy.is_between_steps:
            return
        if self._window is None:
            self._open_window(trainer, strategy.pipeline)
        if self._window is not None:
            self._window.begin_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if not strategy.is_between_steps:
            return
        pipeline: Pipeline = strategy.pipeline
        self._num_steps += 1
        self._memory.look(pipeline)
        if self._window is None:
            self._recent.append(pipeline.last_step_seconds)
        else:
            self._window.end_step()
            if self._window.is_over:
                self._close_window(trainer, pipeline)
        if self._deliberation is not None:
            decision = self._deliberation.end_step()
            if decision is not None:
                self._carry_out(trainer, pipeline, decision)
        if trainer.is_global_zero:
            reporting.log(trainer, self._num_steps, pipeline, self._measured_plan, self._recent, self._memory.peak_bytes)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pipeline: Pipeline = trainer.strategy.pipeline  # type: ignore[attr-defined]
        is_open = self._deliberation is not None
        if self._window is not None:
            pipeline.record(None)
            self._window = None
            is_open |= self._purpose is _Purpose.VERIFY
        if self._deliberation is not None:
            self._deliberation.close()
            self._deliberation = None
            if self._measured_plan is None:
                name = pipeline.plan.planner.name  # not always the strategy's first plan: an earlier fit leaves its own
                rank_zero_info(
                    f"zero_bubble: training ended before a plan with measured costs could run; {name} ran throughout"
                )
        if self.report:
            # where a plan came too late for this run, what was measured is written all the same
            plan = self._priced or pipeline.plan if is_open else pipeline.plan
            counters = reporting.gather_counters(pipeline)
            reporting.write(trainer, plan, self.profile, self.decisions, counters, only_summary=not is_open)

    # -- windows ---------------------------------------------------------------------------------------------------

    def _open_window(self, trainer: pl.Trainer, pipeline: Pipeline) -> None:
        """Start to measure where it is time to."""
        steps = self.profile_steps
        if steps is None or self._deliberation is not None:
            return
        if self._measured_plan is None and self._num_steps == steps[0]:
            self._start(_Purpose.PROFILE, trainer, pipeline, profiling_steps(steps[1] - steps[0]))
        elif self._measured_plan is not None and self.check_every and self._num_steps >= self._next_check:
            self._start(_Purpose.CHECK, trainer, pipeline, running_steps(1))

    def _start(self, purpose: _Purpose, trainer: pl.Trainer, pipeline: Pipeline, kinds: list[StepKind]) -> None:
        self._purpose = purpose
        self._window = ProfileWindow(pipeline, trainer.optimizers, kinds, measures_links=purpose is _Purpose.PROFILE)

    def _close_window(self, trainer: pl.Trainer, pipeline: Pipeline) -> None:
        """Gather, and do what the window was for; the next steps may be measured too."""
        assert self._window is not None
        gathered = self._window.gather()
        profile = gathered if trainer.is_global_zero else None  # replicas run one plan, made from what the first measured
        self._window = None
        self._next_check = self._num_steps + self.check_every
        if self._purpose is _Purpose.CHECK:
            if self._has_drifted(trainer, pipeline, profile):
                assert self.profile_steps is not None
                steps = self.profile_steps[1] - self.profile_steps[0]
                self._start(_Purpose.PROFILE, trainer, pipeline, profiling_steps(steps))
        elif self._purpose is _Purpose.VERIFY:
            self._verify(trainer, pipeline, profile)
        else:
            self.profile = profile
            self._budget = device_memory.settled_budget(pipeline, profile)
            if profile is not None:
                assert profile.costs is not None
                self._priced = repriced(pipeline.plan, profile.costs, self._budget)
                self._memory.compare(self._priced, profile.peak_bytes)
            self._may_think_again = True
            self._deliberate(trainer, pipeline)

    def _verify(self, trainer: pl.Trainer, pipeline: Pipeline, found: Profile | None) -> None:
        """Say how the plan does; one that does worse than the one before is given up, another is priced with what was seen."""
        if found is not None:
            assert self.profile is not None
            self.profile = seen_profile(pipeline.plan, found, self.profile, takes_turns=pipeline.channels is None)
            if any(found.peak_bytes):
                self._memory.compare(pipeline.plan, found.peak_bytes)
        if not self._has_gone_back(trainer, pipeline):
            self._budget = device_memory.settled_budget(pipeline, self.profile)  # layers and what they leave have moved
            if pipeline.channels is None:  # devices take turns, so what a step takes says nothing of the plan
                self._report(trainer, pipeline.plan)
            else:
                self._price_again(trainer, pipeline)

    def _price_again(self, trainer: Any, pipeline: Pipeline) -> None:
        """Predict the running plan with costs as they are now; where it waits more than planned, look once for a better one."""
        before, profile = pipeline.plan.predicted, self.profile
        decision: Decision | None = None
        if profile is not None:
            assert profile.costs is not None
            self._priced = repriced(pipeline.plan, profile.costs, self._budget)
            decision = price_again(pipeline.plan, self._priced, profile.step_seconds, self.min_gain)
        decision = trainer.strategy.broadcast(decision)
        assert decision is not None
        self._follow(trainer, pipeline, decision, is_news=decision.change != "nothing")
        could_gain = pipeline.plan.predicted.bubble_rate - before.bubble_rate
        if could_gain >= self.min_gain and self._may_think_again and self.replan is not Replan.OFF:
            self._may_think_again = False
            self._deliberate(trainer, pipeline)
        else:
            self._report(trainer, pipeline.plan)

    def _deliberate(self, trainer: Any, pipeline: Pipeline) -> None:
        """Let rank 0 look for a better plan with the costs measured last."""
        think, profile = None, self.profile
        if profile is not None:
            assert profile.costs is not None
            is_first = self._measured_plan is None
            terms = make_terms(pipeline, profile, self._budget, self.replan, self.min_gain, self.plan_seconds, is_first)
            think = partial(decide, pipeline.plan, profile.costs, terms)
        self._deliberation = Deliberation(think, trainer.strategy.everyone, waits=not self.background)

    def _carry_out(self, trainer: pl.Trainer, pipeline: Pipeline, decision: Decision) -> None:
        """Run the plan that was decided on from the next step on."""
        self._deliberation = None
        stays = decision.change == "nothing"
        if not stays and self._priced is not None and self.profile is not None:
            self._replaced = self._priced, self.profile
        self._follow(trainer, pipeline, decision)
        if stays and (pipeline.channels is None or not self._may_think_again):  # it was seen as it runs
            self._report(trainer, decision.plan)
        else:
            self._start(_Purpose.VERIFY, trainer, pipeline, running_steps(_NUM_VERIFY_STEPS, counts_bytes=not stays))

    def _follow(self, trainer: pl.Trainer, pipeline: Pipeline, decision: Decision, is_news: bool = True) -> None:
        """Switch, and remember why."""
        if is_news:
            self.decisions.append(LoggedDecision(trainer.global_step, decision.change, decision.reason, decision.seconds))
        planned = f" (rank 0 planned for {decision.seconds:.1f} s)" if decision.seconds else ""
        rank_zero_info(f"zero_bubble, step {trainer.global_step}: {decision.reason}{planned}")
        pipeline.switch(decision.plan)
        self._measured_plan = decision.plan
        self._recent.clear()
        self._next_check = self._num_steps + self.check_every

    def _has_gone_back(self, trainer: pl.Trainer, pipeline: Pipeline) -> bool:
        """Whether the plan before runs again, since with this one steps take longer: costs may be measured in a bad moment."""
        replaced, self._replaced = self._replaced, None
        decision: Decision | None = None
        if replaced is not None and self.profile is not None and pipeline.channels is not None:  # else devices take turns
            (before, profile), took = replaced, self.profile.step_seconds
            if took is not None and profile.step_seconds is not None:
                decision = go_back(pipeline.plan, took, before, profile.step_seconds)
        decision = trainer.strategy.broadcast(decision)
        if decision is None:
            return False
        if replaced is not None:
            self._priced, self.profile = replaced
        self._may_think_again = False
        self._follow(trainer, pipeline, decision)
        self._start(_Purpose.VERIFY, trainer, pipeline, running_steps(_NUM_VERIFY_STEPS))
        return True

    def _has_drifted(self, trainer: pl.Trainer, pipeline: Pipeline, profile: Profile | None) -> bool:
        """Whether a chunk takes longer or shorter than planned; on rank 0 says which."""
        drift: str | None = None
        if profile is not None:
            drift = find_drift(pipeline.plan, profile.pass_seconds, self.drift_tolerance)
            if drift is not None:
                rank_zero_info(f"zero_bubble, step {trainer.global_step}: {drift}; measuring again")
        drift = trainer.strategy.broadcast(drift)
        self.num_drifts += drift is not None
        return drift is not None

    def _report(self, trainer: Any, plan: Plan) -> None:
        """Write down what was measured beside what was planned; called on every rank."""
        if self.report:
            reporting.write(trainer, plan, self.profile, self.decisions)
