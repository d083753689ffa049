#!/bin/sh
# What a newcomer does, in a new virtual environment: pip install, then every command of README.md and docs/ as written,
# on tiny local models (tools/run_docs.py). Fetches pip packages and nothing else. Takes minutes.
#
#   tools/fresh_install.sh                  all pages, and the site
#   tools/fresh_install.sh quickstart.md    these pages
#
# BASE_PYTHON: the interpreter, 3.11 or newer. torch's version comes from constraints.txt; plain torch for Linux is a
# CUDA build of several gigabytes, so its CPU build is taken if pip finds no other.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${BASE_PYTHON:-python3}" -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip install -qq --disable-pip-version-check"
cpu=https://download.pytorch.org/whl/cpu
$pip -c constraints.txt "torch==2.13.0+cpu" 2>/dev/null || $pip -c constraints.txt --index-url $cpu torch
# A copy is installed, so that the checkout stays as it is.
mkdir "$folder/source"
cp -r pyproject.toml setup.py README.md LICENSE src "$folder/source"
$pip -c constraints.txt "$folder/source[lora,data,prune,docs]"
unset PYTHONPATH PYTHONHOME
"$folder/venv/bin/outsize" --version
if [ $# = 0 ]; then
	NO_MKDOCS_2_WARNING=1 "$folder/venv/bin/python" -m mkdocs build --quiet --strict --site-dir "$folder/site"
	echo "the site has $(find "$folder/site" -name '*.html' | wc -l) pages"
fi
"$folder/venv/bin/python" -m tools.run_docs "$@"
