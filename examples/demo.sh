#!/bin/sh
# Weft in a minute: every line that begins with $ is a command that you can type yourself.
# `make demo` runs this with the project's own environment on the path.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
program=$folder/program

say() { printf '\n\033[1m%s\033[0m\n' "$1"; }
run() { printf '$ %s\n' "$*" | sed "s|$folder/||g"; "$@"; }

say "1. A GPT written for one device. Which operators does it have, and can they be cut?"
run weft ops examples/gpt.py

say "2. A plan for four devices: what is cut where, what is sent, and the proof that nothing is missing."
run weft show examples/gpt.py --plan dp=2,tp=2 --out "$program"

say "3. Four processes against one: the loss, every gradient, every updated weight."
run weft verify examples/gpt.py --plan dp=2,tp=2 --processes

say "4. The control. The program is code that you may edit; without one of its sums it must be found out."
run sed -i.orig '/ tokens = self.comm.all_reduce(/d' "$program/program.py"
if run weft verify examples/gpt.py --program "$program"; then
    echo "not detected" >&2
    exit 1
fi
echo "detected: the edited program is not equal to one device"

say "5. Train: four processes, and one process for comparison."
run weft train examples/gpt.py --plan dp=2,tp=2 --steps 150 --cache "$folder/cache"
run weft train examples/gpt.py --plan dp=1 --steps 150 --cache "$folder/cache"

say "6. A pipeline: two stages, four micro-batches a step. Its time table, and the comparison with one device."
run weft show examples/gpt.py --plan pp=2,microbatches=4 --schedule
run weft verify examples/gpt.py --plan pp=2,microbatches=4

say "7. The program lies in program/program.py: it is $(wc -l < "$program/program.py.orig" | tr -d ' ') lines of Python. Read it:"
printf '$ weft show examples/gpt.py --plan dp=2,tp=2 --code\n'

say "8. Your own model: a file with model(), which returns the module, and example(), which returns a batch."
printf '$ weft verify your_model.py --plan dp=2\n$ weft train your_model.py --plan dp=2\n'
