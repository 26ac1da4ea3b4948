// SPDX-License-Identifier: Apache-2.0
#include "lib/output/file_gaps.h"

#include <algorithm>
#include <utility>

#include "lib/source/pieces.h"

namespace reshard {

FileGaps::FileGaps(const Catalog& catalog) : files_(catalog.files.size()) {
  for (const Tensor& tensor : catalog.tensors())
    for (const FragmentList* const list : {&tensor.fragments, &tensor.replicas})
      for (std::size_t i = 0; i < list->size(); ++i)
        for (const Piece& p : pieces_between(*list, i, byte_size(tensor.dtype), 0, list->extent(i).length))
          add_written(p.extent.file, p.extent.offset + p.begin, p.end - p.begin);
}

void FileGaps::add_written(std::uint32_t file, Index offset, Index length) {
  if (length == 0) return;
  if (!written_.empty()) {
    Extent& last = written_.back();
    if (last.file == file && last.offset + last.length == offset) {
      last.length += length;
      return;
    }
  }
  written_.push_back({file, offset, length});
}

Status FileGaps::visit(const std::function<Index(std::uint32_t file)>& size_of,
                       const std::function<Status(const Extent& gap)>& visit) {
  std::sort(written_.begin(), written_.end(),
            [](const Extent& a, const Extent& b) { return std::pair(a.file, a.offset) < std::pair(b.file, b.offset); });
  auto next = written_.begin();
  for (std::uint32_t file = 0; file < files_; ++file) {
    Index end = 0;  // of what is known to be written
    const auto fill_to = [&](Index offset) { return offset > end ? visit({file, end, offset - end}) : Status(); };
    for (; next != written_.end() && next->file == file; ++next) {
      TRY(fill_to(next->offset));
      end = std::max(end, next->offset + next->length);
    }
    TRY(fill_to(size_of(file)));
  }
  return {};
}

}  // namespace reshard
