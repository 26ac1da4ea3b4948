// SPDX-License-Identifier: Apache-2.0
// The axis along which a stacked tensor has the layers: MaxText's param_scan_axis, 1 in the families' tables.
#pragma once

#include "lib/model/family.h"

namespace reshard {

// Returns the family for a catalog whose stacked tensors have the layers along their first axis, although the tables of
// the numbered() family have them along another one; otherwise the family itself. The shapes decide. The result lives
// as long as the process. Thread-safe.
const Family& with_axes_of(const Catalog& catalog, const Family& family, Convention convention);

}  // namespace reshard
