"""Registers, stack and spills of every kernel, from the build log of ``nvcc -Xptxas=-v``.

    python .ci/ptxas_report.py LOG [--allow REGEX]

Fails when a kernel spills registers or keeps an array in local memory (a stack frame); kernels
whose name matches ``--allow`` may.
"""

from __future__ import annotations

import argparse
import re
import subprocess


def kernels(log: str) -> list[dict[str, int | str]]:
    """One record for each kernel and architecture."""
    found: list[dict[str, int | str]] = []
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            found.append({"name": m[1], "architecture": m[2], "stack": 0, "spills": 0})
        elif not found:
            continue
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line):
            found[-1].update(stack=int(m[1]), spills=int(m[2]) + int(m[3]))
        elif m := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[-1].update(registers=int(m[1]), shared=int(shared[1]) if shared else 0)
    text = "\n".join(str(k["name"]) for k in found)
    run = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    for kernel, name in zip(found, run.stdout.splitlines(), strict=True):
        name = re.sub(r"\(anonymous namespace\)::|normalign::|^void ", "", name)
        kernel["name"] = re.sub(r"\(.*", "", name)
    return found


def main() -> int:
    """Prints the table; the number of kernels over the limits is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log")
    parser.add_argument("--allow", default="$^", help="names that may spill")
    args = parser.parse_args()
    with open(args.log) as file:
        found = kernels(file.read())
    bad = 0
    print(f"{'kernel':60} {'arch':8} {'registers':>9} {'shared':>7} {'stack':>6} {'spills':>7}")
    for k in sorted(found, key=lambda k: (str(k["name"]), str(k["architecture"]))):
        wrong = (k["stack"] or k["spills"]) and not re.search(args.allow, str(k["name"]))
        bad += bool(wrong)
        print(
            f"{k['name']:60} {k['architecture']:8} {k.get('registers', 0):9} "
            f"{k.get('shared', 0):7} {k['stack']:6} {k['spills']:7}{'  SPILLS' if wrong else ''}"
        )
    print(f"{len(found)} kernels, {bad} with spills or local memory")
    return 1 if bad or not found else 0


if __name__ == "__main__":
    raise SystemExit(main())
