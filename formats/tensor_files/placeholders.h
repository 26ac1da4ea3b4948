// Models that were saved without their numbers: ZeRO 3 keeps every parameter in runs among its ranks, and a tensor of
// size [0] in its place. save_pretrained() and torch.save() of such a model write those.
#pragma once

#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/path_snapshot.h"

namespace reshard {

// Unsupported where the most of the weights are placeholders, with the directory of the run that has the numbers.
// `place` is what was opened.
Status refuse_placeholders(const Catalog& catalog, const PathSnapshot& place);

}  // namespace reshard
