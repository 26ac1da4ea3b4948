// A format as short as possible, to test what a row of the table provides. docs/adding.md walks through it.
//
//   toy.json    {NAME: {"dtype": "float32", "shape": [4, 8], "offset": 128}, ...}
//   toy.data    the tensors, whole and row-major
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kToyFormat;

}  // namespace reshard
