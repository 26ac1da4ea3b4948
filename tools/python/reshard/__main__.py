# SPDX-License-Identifier: Apache-2.0
from ._program import main

main()
