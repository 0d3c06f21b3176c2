"""The report of ``vprop reproduce``: result dictionaries in, one self-contained HTML page and static figures out."""

from vprop.lab.report.schema import ReportError
from vprop.lab.report.write import write_report

__all__ = ["ReportError", "write_report"]
