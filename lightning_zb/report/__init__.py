"""Pictures, traces and tables of plans and of measured steps."""

from lightning_zb.report.directory import write_report
from lightning_zb.report.grid import terminal_grid
from lightning_zb.report.picture import svg, timeline_picture
from lightning_zb.report.summary import Observed, summary
from lightning_zb.report.trace import chrome_trace

__all__ = ["Observed", "chrome_trace", "summary", "svg", "terminal_grid", "timeline_picture", "write_report"]
