"""Plan files and costs files: stable, versioned JSON that the command line reads and writes.

Infinite numbers (a link without bandwidth limit, a device without memory limit) are written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole, Link, PassOverhead, Reduction
from lightning_zb.planning.placement import Partition, Placement
from lightning_zb.planning.plan import Plan, PlannerInfo, PlanStatus, Prediction
from lightning_zb.planning.schedule import Pass, Schedule

FORMAT = "lightning-zb-plan/1"

T = TypeVar("T")
Json = Mapping[str, Any]

_COSTS = ("forward", "backward_input", "backward_weight")
_BYTES = ("activation_bytes", "weight_stash_bytes", "parameter_bytes", "output_bytes", "transient_bytes")


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file."""
    Path(path).write_text(json.dumps(plan_to_json(plan), indent=1) + "\n")


def read_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        ValueError: a field is missing or wrong; the message names file and field.
    """
    return _read(path, plan_from_json)


def write_costs(costs: CostModel, path: str | Path) -> None:
    """Write a costs file."""
    Path(path).write_text(json.dumps(costs_to_json(costs), indent=1) + "\n")


def read_costs(path: str | Path) -> CostModel:
    """Read a costs file.

    Raises:
        ValueError: a field is missing or wrong; the message names file and field.
    """
    return _read(path, costs_from_json)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The content of a plan file."""
    return {
        "format": FORMAT,
        "devices": plan.num_devices,
        "microbatches": plan.num_microbatches,
        "layers": [layer.name for layer in plan.costs.layers],
        "partition": [list(chunk) for chunk in plan.partition.chunks],
        "placement": list(plan.placement.devices),
        "passes": [[str(p) for p in order] for order in plan.schedule.orders],
        "costs": costs_to_json(plan.costs),
        "memory_limit": None if plan.memory_limit is None else [_finite(limit) for limit in plan.memory_limit],
        "predicted": asdict(plan.predicted),
        "planner": {**asdict(plan.planner), "status": plan.planner.status.value},
    }


def plan_from_json(data: Json) -> Plan:
    """The plan of a plan file's content.

    Raises:
        ValueError: a field is missing or wrong; the message names it.
    """
    if "format" not in data and "layers" in data and "passes" not in data:
        raise ValueError("is a costs file; write a plan file, which lightning-zb plan --costs ... --out ... makes of it")
    file_format = _field(data, "format", _text)
    if file_format != FORMAT:
        raise FieldError(("format",), f"is {file_format!r}, this version reads {FORMAT!r}")
    num_devices, num_microbatches = _field(data, "devices", _count), _field(data, "microbatches", _count)
    costs = _field(data, "costs", costs_from_json)
    names = _field(data, "layers", _list(_text))
    if names != [layer.name for layer in costs.layers]:
        raise FieldError(("layers",), "differ from the names in costs.layers")
    partition = _field(data, "partition", lambda value: Partition(tuple(map(tuple, _list(_list(_index))(value)))))
    if partition.num_layers != len(names):
        raise FieldError(("partition",), f"covers {partition.num_layers} layers, but there are {len(names)}")
    placement = _field(data, "placement", lambda value: Placement(tuple(_list(_index)(value)), num_devices))
    if placement.num_chunks != partition.num_chunks:
        raise FieldError(("placement",), f"has {placement.num_chunks} chunks, partition {partition.num_chunks}")
    passes = _field(data, "passes", _list(_list(lambda value: Pass.parse(_text(value)))))
    schedule = Schedule(tuple(map(tuple, passes)))
    if schedule.num_microbatches != num_microbatches:
        raise FieldError(("passes",), f"run {schedule.num_microbatches} microbatches, microbatches says {num_microbatches}")
    _named("passes", schedule.check, placement)
    limit = _field(data, "memory_limit", _optional(_list(_limit)))
    if limit is not None and len(limit) != num_devices:
        raise FieldError(("memory_limit",), f"has {len(limit)} entries for {num_devices} devices")
    return Plan(
        costs=costs,
        partition=partition,
        placement=placement,
        schedule=schedule,
        predicted=_field(data, "predicted", _prediction),
        planner=_field(data, "planner", _planner),
        memory_limit=None if limit is None else tuple(limit),
    )


def costs_to_json(costs: CostModel) -> dict[str, Any]:
    """The content of a costs file; what a layer has beyond the required fields is written only where it is set."""
    return {
        "layers": [_layer_to_json(layer) for layer in costs.layers],
        "link": _link_to_json(costs.link)
        if isinstance(costs.link, Link)
        else [[_link_to_json(link) for link in row] for row in costs.link],
        "device_speed": None if costs.device_speed is None else list(costs.device_speed),
        **({} if costs.reduction is None else {"reduction": _reduction_to_json(costs.reduction)}),
        **({} if costs.overhead == PassOverhead() else {"overhead": asdict(costs.overhead)}),
    }


def costs_from_json(data: Json) -> CostModel:
    """The cost model of a costs file's content.

    Raises:
        ValueError: a field is missing or wrong; the message names it.
    """
    if "passes" in data:
        raise FieldError(("passes",), "belongs to a plan file; a costs file is what such a file holds as costs")
    _refuse_unknown(data, {f.name for f in fields(CostModel)})
    layers = _field(data, "layers", _list(_layer))
    if not layers:
        raise FieldError(("layers",), "is empty; list at least one layer")
    speeds = _field(data, "device_speed", _optional(_list(_positive)), default=None)
    return CostModel(
        layers=tuple(layers),
        link=_field(data, "link", _link_or_matrix, default=Link()),
        device_speed=None if speeds is None else tuple(speeds),
        reduction=_field(data, "reduction", _optional(_reduction), default=None),
        overhead=_field(data, "overhead", _overhead, default=PassOverhead()),
    )


def _layer_to_json(layer: LayerCost) -> dict[str, Any]:
    record = asdict(layer)
    optional: dict[str, Any] = {"role": LayerRole.LAYER, "state_bytes": None, "workspace_bytes": {}, "backward": None}
    optional["transient_bytes"] = 0.0
    record = {key: value for key, value in record.items() if key not in optional or value != optional[key]}
    return {**record, "role": layer.role.value} if "role" in record else record


def _layer(value: Any) -> LayerCost:
    data = _mapping(value)
    _refuse_unknown(data, {f.name for f in fields(LayerCost)})
    return LayerCost(
        name=_field(data, "name", _text),
        **{key: _field(data, key, _not_negative) for key in _COSTS},
        **{key: _field(data, key, _not_negative, default=0.0) for key in _BYTES},
        role=_field(data, "role", LayerRole, default=LayerRole.LAYER),
        state_bytes=_field(data, "state_bytes", _optional(_not_negative), default=None),
        workspace_bytes=_field(
            data, "workspace_bytes", lambda v: {k: _not_negative(b) for k, b in _mapping(v).items()}, default={}
        ),
        backward=_field(data, "backward", _optional(_not_negative), default=None),
    )


def _link_to_json(link: Link) -> dict[str, Any]:
    return {"latency": link.latency, "bandwidth": _finite(link.bandwidth)}


def _link(value: Any) -> Link:
    data = _mapping(value)
    _refuse_unknown(data, {"latency", "bandwidth"})
    return Link(
        latency=_field(data, "latency", _not_negative, default=0.0),
        bandwidth=_field(data, "bandwidth", lambda v: math.inf if v is None else _positive(v), default=math.inf),
    )


def _reduction_to_json(reduction: Reduction) -> dict[str, Any]:
    return {"num_replicas": reduction.num_replicas, "link": _link_to_json(reduction.link)}


def _reduction(value: Any) -> Reduction:
    data = _mapping(value)
    _refuse_unknown(data, {"num_replicas", "link"})
    return Reduction(_field(data, "num_replicas", _count), _field(data, "link", _link, default=Link()))


def _overhead(value: Any) -> PassOverhead:
    data = _mapping(value)
    _refuse_unknown(data, set(_COSTS))
    return PassOverhead(**{key: _field(data, key, _not_negative, default=0.0) for key in _COSTS})


def _link_or_matrix(value: Any) -> Link | tuple[tuple[Link, ...], ...]:
    return tuple(map(tuple, _list(_list(_link))(value))) if isinstance(value, list) else _link(value)


def _prediction(value: Any) -> Prediction:
    data = _mapping(value)
    per_device = ("peak_bytes", "busy")
    read: dict[str, Any] = {f.name: _number for f in fields(Prediction)}
    read.update({key: lambda v: tuple(_list(_number)(v)) for key in per_device})
    return Prediction(**{key: _field(data, key, reader) for key, reader in read.items()})


def _planner(value: Any) -> PlannerInfo:
    data = _mapping(value)
    return PlannerInfo(
        name=_field(data, "name", _text),
        seconds=_field(data, "seconds", _not_negative),
        status=_field(data, "status", PlanStatus),
        reason=_field(data, "reason", _text, default=""),
        options=_field(data, "options", lambda v: dict(_mapping(v)), default={}),
    )


_REQUIRED: Any = object()


class FieldError(ValueError):
    """A field is missing or wrong.

    Args:
        path: names of the field and of those around it, outermost first; list entries as `[3]`.
        message: what is wrong with it.
    """

    def __init__(self, path: tuple[str, ...], message: str) -> None:
        super().__init__(f"{''.join(part if part.startswith('[') else '.' + part for part in path).lstrip('.')}: {message}")
        self.path = path
        self.message = message


def _field(data: Json, key: str, read: Callable[[Any], T], default: Any = _REQUIRED) -> T:
    if key in data:
        return _named(key, read, data[key])
    if default is _REQUIRED:
        raise FieldError((key,), "is missing")
    return default


def _named(name: str, read: Callable[[Any], T], value: Any) -> T:
    """Read a value; whatever is wrong inside is reported under its name."""
    try:
        return read(value)
    except FieldError as error:
        raise FieldError((name, *error.path), error.message) from None
    except ValueError as error:
        raise FieldError((name,), str(error)) from None


def _list(read: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    def read_all(value: Any) -> list[T]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{value!r} is not a list")
        return [_named(f"[{i}]", read, item) for i, item in enumerate(value)]

    return read_all


def _optional(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else read(value)


def _mapping(value: Any) -> Json:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not an object with named fields")
    return value


def _refuse_unknown(data: Json, known: set[str]) -> None:
    for key in data:
        if key not in known:
            raise FieldError((key,), f"is not a known field; known are {', '.join(sorted(known))}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{value!r} is not a number")
    return value


def _not_negative(value: Any) -> float:
    if _number(value) < 0:
        raise ValueError(f"{value!r} is negative")
    if math.isinf(value):
        raise ValueError(f"{value!r} is not finite")
    return value


def _positive(value: Any) -> float:
    if not _number(value) > 0:
        raise ValueError(f"{value!r} is not positive")
    return value


def _limit(value: Any) -> float:
    return math.inf if value is None else _number(value)


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not an index (0, 1, 2, ...)")
    return value


def _count(value: Any) -> int:
    if _index(value) == 0:
        raise ValueError("0 is not a count (1, 2, 3, ...)")
    return value


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _read(path: str | Path, parse: Callable[[Json], T]) -> T:
    try:
        return parse(_mapping(json.loads(Path(path).read_text())))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
