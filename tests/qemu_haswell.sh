#!/usr/bin/env bash
# Runs a built wheel on an emulated processor with AVX2 and without AVX-512: no path of it may die of an illegal
# instruction, and its answers must have the bits that this processor gives at the same level.
#
#   qemu_haswell.sh PYTHON WHEEL     PYTHON: an environment with encast's dependencies
set -euo pipefail
python=$1 wheel=$2
here=$(cd "$(dirname "$0")" && pwd)

if ! command -v qemu-x86_64 > /dev/null; then
  echo "SKIPPED: no qemu-x86_64 (Debian and Ubuntu: apt install qemu-user)"
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m zipfile -e "$wheel" "$work/site"
# The wheel's own files first; the environment's packages after, without its editable hooks.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
interpreter=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
export PYTHONPATH="$work/site:$here:$packages" PYTHONDONTWRITEBYTECODE=1

ENCAST_ISA=avx2 "$interpreter" "$here/qemu_smoke.py" make "$work"
qemu-x86_64 -cpu Haswell "$interpreter" "$here/qemu_smoke.py" check "$work" 2> >(grep -v "TCG doesn't support" >&2)
echo "no illegal instruction on Haswell"
