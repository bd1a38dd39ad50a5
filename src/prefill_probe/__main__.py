"""``prefill-probe``, also as ``python -m prefill_probe``.

Its help is printed without the library that parses the command line: to import that alone takes more than four times
as long as an interpreter that does nothing (``scripts/bench startup`` prints both).
"""

from __future__ import annotations

import sys

HELP = """\
Usage: prefill-probe [OPTIONS] COMMAND [ARGS]...

  Run one full prefill chunk before an LLM engine serves.

  Installed beside FreeToken, every `ft serve` is probed by itself; these
  commands show what was found.

  Example:
    ft serve --model MODEL
    prefill-probe show

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Commands:
  check     Try an engine command line on this machine's GPU.
  estimate  Try an engine command line on a virtual GPU.
  hook      Whether `ft serve` of this environment is probed.
  show      Show the last record of this machine, or FILE.
  systemd   A smoke test, and a drop-in for an engine's service.
"""


def main() -> None:
    """Run the command line of this process."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        sys.stdout.write(HELP)
        return
    from prefill_probe.cli import main as commands

    commands(prog_name="prefill-probe")


if __name__ == "__main__":
    main()
