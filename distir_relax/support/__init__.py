"""Strict reading of files, JSON and TOML; units, learning rates, user functions."""

from distir_relax.support.documents import parse_json, parse_json_string, parse_toml
from distir_relax.support.fields import MOST, Fields, is_finite, shown
from distir_relax.support.files import check_name, check_regular, file_within, read_bytes, read_text, shown_path

__all__ = [
    "MOST",
    "Fields",
    "check_name",
    "check_regular",
    "file_within",
    "is_finite",
    "parse_json",
    "parse_json_string",
    "parse_toml",
    "read_bytes",
    "read_text",
    "shown",
    "shown_path",
]
