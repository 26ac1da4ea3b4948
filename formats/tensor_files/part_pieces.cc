#include "formats/tensor_files/part_pieces.h"

namespace reshard {

std::optional<Fragment> in_whole(const Fragment& local, const LocalBox& part, Index element_bytes) {
  const Box held = intersect(local.box, {part.at, part.box.shape});
  if (held.empty()) return std::nullopt;
  Fragment out = local;
  out.box.shape = held.shape;
  for (int d = 0; d < held.rank(); ++d) {
    out.start += (held.origin[d] - local.box.origin[d]) * local.strides[d] * element_bytes;
    out.box.origin[d] = part.box.origin[d] + held.origin[d] - part.at[d];
  }
  return out;
}

}  // namespace reshard
