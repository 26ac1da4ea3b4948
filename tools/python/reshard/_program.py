# SPDX-License-Identifier: Apache-2.0
"""The program `reshard`, as it is on the command line."""

import sys


def main():
    from . import _reshard

    sys.stdout.flush()
    sys.exit(_reshard.run_program(["reshard", *sys.argv[1:]]))
