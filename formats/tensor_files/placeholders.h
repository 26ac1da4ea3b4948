// SPDX-License-Identifier: Apache-2.0
// Models that were saved without their weights. ZeRO 3 spreads every parameter over its ranks and leaves a tensor of
// shape [0] in its place; save_pretrained() and torch.save() of such a model write these placeholders.
#pragma once

#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/path_snapshot.h"

namespace reshard {

// Fails with kUnsupported if most of the weights are placeholders. If a directory next to `place`, which was opened,
// has the real weights, the error names it.
Status refuse_placeholders(const Catalog& catalog, const PathSnapshot& place);

}  // namespace reshard
