"""Rows in and out: text, JSONL, CSV, Parquet, npy; bad rows set aside; labelled data sets."""

from encast.data.readers import FORMATS, RowReader, open_rows
from encast.data.rows import BadRow, BadRows, Row
from encast.data.writers import OUTPUT_FORMATS, Writer, open_writer

__all__ = [
    "FORMATS",
    "OUTPUT_FORMATS",
    "BadRow",
    "BadRows",
    "Row",
    "RowReader",
    "Writer",
    "open_rows",
    "open_writer",
]
