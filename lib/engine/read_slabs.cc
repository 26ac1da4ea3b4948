// SPDX-License-Identifier: Apache-2.0
#include "lib/engine/read_slabs.h"

#include <iterator>

#include "lib/base/parallel.h"
#include "lib/engine/slabs_ahead.h"

namespace reshard {

Status read_slabs(const std::vector<WalkItem>& items, const SlabList& list, Index first, Index end,
                  TensorSource& source, const RunOptions& options, const std::vector<Buffers>& buffers,
                  const SlabVisit& visit, Index ahead) {
  SlabsAhead fetched({items, list, end, source, std::ssize(buffers.front().scratch), ahead}, first);
  return parallel_for(end - first, static_cast<int>(buffers.size()), [&](int thread, Index k) -> Status {
    TRY(check_not_interrupted(options));
    const WalkSlab s = list.get(first + k);
    const Buffers& b = buffers[thread];
    fetched.begin();
    const auto side = read_box(source, items[s.item].tensor, s.box, b.slab, b);
    if (!side && !skips_damage(options, side.error())) return side.error();
    fetched.end(s);
    return side ? visit(s, b.slab, *side, b) : Status();
  });
}

}  // namespace reshard
