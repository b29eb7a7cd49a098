#!/usr/bin/env bash
# What only a GPU can show, in under ten minutes: bash benchmarks/gpu.sh [--dry-run] [--out FOLDER]
# Everything it needs is checked before anything is measured. --dry-run does all of it at toy size on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" benchmarks/gpu.py "$@"
