// SPDX-License-Identifier: Apache-2.0
// Implements the checks of catalog.h.
#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>

#include "lib/base/cursor.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/cover_checker.h"

namespace reshard {
namespace {

std::string name_of(const Tensor& tensor, const Box& box) { return tensor_text(tensor.name) + " " + to_string(box); }

// Returns the sorted coordinates along one dimension at which a box begins or ends.
std::vector<Index> cut_points(const std::vector<Box>& boxes, Index extent, int d) {
  std::vector<Index> cuts = {0, extent};
  cuts.reserve(2 * boxes.size() + 2);
  for (const Box& box : boxes) {
    cuts.push_back(box.begin(d));
    cuts.push_back(box.end(d));
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

std::size_t cell_of(const std::vector<Index>& cuts, Index point) {
  return std::lower_bound(cuts.begin(), cuts.end(), point) - cuts.begin();
}

// The grid drawn by the boxes' own edges, and the box that covers each cell. Only built if the number of cells is
// moderate; shards of one mesh have one cell per box.
class Grid {
 public:
  static std::optional<Grid> make(const std::vector<Box>& boxes, const Dims& shape) {
    Grid grid;
    Index cells = 1;
    const Index limit = 64 * std::ssize(boxes) + 4096;
    for (int d = 0; d < shape.rank(); ++d) {
      grid.cuts_.push_back(cut_points(boxes, shape[d], d));
      cells *= std::ssize(grid.cuts_.back()) - 1;
      if (cells > limit) return std::nullopt;
    }
    grid.owner_.assign(cells, -1);
    return grid;
  }

  // Marks the cells of box i. Returns a box that already covered one of them, if any.
  std::optional<std::size_t> claim(const Box& box, std::size_t i) {
    std::optional<std::size_t> other;
    each_cell(box, [&](std::size_t cell) {
      if (owner_[cell] >= 0) other = owner_[cell];
      owner_[cell] = static_cast<std::int32_t>(i);
    });
    return other;
  }

  // Returns a region that no box covers, extended along the last dimension.
  Box first_hole() const {
    const auto free = std::find(owner_.begin(), owner_.end(), -1);
    std::size_t cell = free - owner_.begin();
    const int rank = static_cast<int>(cuts_.size());
    Box box{Dims::filled(rank, 0), Dims::filled(rank, 0)};
    for (int d = rank - 1; d >= 0; --d) {
      const auto& cuts = cuts_[d];
      const std::size_t n = cuts.size() - 1;
      std::size_t last = cell % n + 1;
      if (d == rank - 1)
        for (auto next = free + 1; last < n && *next < 0; ++next) ++last;
      box.origin[d] = cuts[cell % n];
      box.shape[d] = cuts[last] - cuts[cell % n];
      cell /= n;
    }
    return box;
  }

 private:
  template <class Visit>
  void each_cell(const Box& box, Visit visit) const {
    std::vector<std::size_t> lo, hi;
    for (int d = 0; d < box.rank(); ++d) {
      lo.push_back(cell_of(cuts_[d], box.begin(d)));
      hi.push_back(cell_of(cuts_[d], box.end(d)));
    }
    std::vector<std::size_t> at = lo;
    while (true) {
      std::size_t cell = 0;
      for (std::size_t d = 0; d < at.size(); ++d) cell = cell * (cuts_[d].size() - 1) + at[d];
      visit(cell);
      std::size_t d = at.size();
      while (d > 0 && ++at[d - 1] == hi[d - 1]) {
        at[d - 1] = lo[d - 1];
        --d;
      }
      if (d == 0) return;
    }
  }

  std::vector<std::vector<Index>> cuts_;
  std::vector<std::int32_t> owner_;
};

// Finds an overlap of boxes that form no grid: sweeps along the dimension with the most cuts and compares each box with
// those still open.
std::optional<std::pair<std::size_t, std::size_t>> find_overlap_by_sweep(const std::vector<Box>& boxes,
                                                                         const Dims& shape) {
  int sweep = 0;
  std::size_t most = 0;
  for (int d = 0; d < shape.rank(); ++d)
    if (const std::size_t n = cut_points(boxes, shape[d], d).size(); n > most) {
      most = n;
      sweep = d;
    }
  std::vector<std::size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return boxes[a].begin(sweep) < boxes[b].begin(sweep); });
  std::vector<std::size_t> open;
  for (const std::size_t i : order) {
    std::erase_if(open, [&](std::size_t o) { return boxes[o].end(sweep) <= boxes[i].begin(sweep); });
    for (const std::size_t o : open)
      if (!intersect(boxes[o], boxes[i]).empty()) return std::pair(o, i);
    open.push_back(i);
  }
  return std::nullopt;
}

Error overlap_error(const Tensor& tensor, const Box& a, const Box& b) {
  return corrupt(name_of(tensor, a) + " overlaps " + to_string(b) + ": every element must be stored once");
}

Status check_box(const Tensor& tensor, const Box& box) {
  if (box.rank() != tensor.shape.rank() || !contains(whole(tensor.shape), box))
    return corrupt(tensor_text(tensor.name) + ": box of shape " + to_string(box.shape) + " at " +
                   to_string(box.origin) + " is outside the tensor's shape " + to_string(tensor.shape));
  return {};
}

Status check_replicas(const Tensor& tensor) {
  if (tensor.replicas.empty()) return {};
  std::vector<Box> stored;
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i) stored.push_back(tensor.fragments.box(i));
  std::sort(stored.begin(), stored.end());
  for (std::size_t i = 0; i < tensor.replicas.size(); ++i) {
    const Box box = tensor.replicas.box(i);
    TRY(check_box(tensor, box));
    if (!std::binary_search(stored.begin(), stored.end(), box))
      return corrupt(name_of(tensor, box) + ": expected a replica of a stored box, got a box that no fragment has");
  }
  return {};
}

// Checks that the extent contains every element that the strides reach.
Status check_reach(const Catalog& catalog, const Tensor& tensor, const Fragment& f) {
  if (f.box.empty()) return {};
  Index last = 0;  // element offset of the furthest
  for (int d = 0; d < f.box.rank(); ++d) {
    const auto step = checked_mul(f.box.shape[d] - 1, f.strides[d]);
    const auto sum = step && f.strides[d] >= 0 ? checked_add(last, *step) : std::nullopt;
    if (!sum) return corrupt(name_of(tensor, f.box) + ": strides " + to_string(f.strides) + " are out of range");
    last = *sum;
  }
  const auto count = checked_add(last, 1);
  const auto bytes = count ? checked_mul(*count, byte_size(tensor.dtype)) : std::nullopt;
  if (!bytes || !fits_inside(f.start, *bytes, f.payload_bytes()))
    return corrupt(at(catalog.file_path(f.extent.file), f.extent.offset) + ": " + name_of(tensor, f.box) +
                   ": strides " + to_string(f.strides) + " reach past the " + std::to_string(f.payload_bytes()) +
                   (f.encoding ? " decoded bytes" : " stored bytes"));
  return {};
}

Status check_file_range(const Catalog& catalog, const Extent& e, const std::string& what) {
  const CatalogFile& file = catalog.files[e.file];
  const std::string path = catalog.file_path(e.file);
  if (file.size < 0) return io_error(path + ": file is missing; it contains " + what);
  if (fits_inside(e.offset, e.length, file.size)) return {};
  const auto end = checked_add(e.offset, e.length);
  return corrupt(at(path, e.offset) + ": " + what + ": data ends at byte " + (end ? with_commas(*end) : "2^63") +
                 ", but the file has " + count_of(file.size, "byte") + ": it is truncated or belongs to another save");
}

// Checks that every stored element of a tensor is in an existing file.
Status check_places(const Catalog& catalog, const Tensor& tensor) {
  for (const FragmentList* list : {&tensor.fragments, &tensor.replicas})
    for (std::size_t i = 0; i < list->size(); ++i) {
      const Box box = list->box(i);
      if (box.empty()) continue;
      const Extent& e = list->extent(i);
      if (catalog.files[e.file].size < 0 || !fits_inside(e.offset, e.length, catalog.files[e.file].size))
        return check_file_range(catalog, e, name_of(tensor, box));
      if (tensor.located) TRY(check_reach(catalog, tensor, list->get(i)));
    }
  return {};
}

}  // namespace

Status check_cover(const Tensor& tensor) {
  std::vector<Box> boxes;
  boxes.reserve(tensor.fragments.size());
  Index covered = 0;
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i) {
    const Box box = tensor.fragments.box(i);
    TRY(check_box(tensor, box));
    if (box.empty()) continue;
    boxes.push_back(box);
    const auto sum = checked_add(covered, volume(box));
    if (!sum) return corrupt(name_of(tensor, box) + ": the boxes' volumes overflow");
    covered = *sum;
  }
  const Index expected = tensor.elements();
  if (tensor.shape.rank() == 0) {
    if (boxes.size() == 1) return {};
    return corrupt(tensor_text(tensor.name) + ": expected one stored value, got " + std::to_string(boxes.size()));
  }
  if (boxes.size() == 1 && covered == expected) return {};

  std::optional<Grid> grid = Grid::make(boxes, tensor.shape);
  if (grid) {
    for (std::size_t i = 0; i < boxes.size(); ++i)
      if (const auto other = grid->claim(boxes[i], i)) return overlap_error(tensor, boxes[*other], boxes[i]);
  } else if (const auto pair = find_overlap_by_sweep(boxes, tensor.shape)) {
    return overlap_error(tensor, boxes[pair->first], boxes[pair->second]);
  }
  if (covered == expected) return {};
  return corrupt(tensor_text(tensor.name) + " " + to_string(tensor.shape) + ": " + with_commas(expected - covered) +
                 " of " + count_of(expected, "element") + (expected - covered == 1 ? " is" : " are") + " missing" +
                 (grid ? ", the first in " + to_string(grid->first_hole()) : ""));
}

Status CoverChecker::check(const Tensor& tensor) {
  const std::uint64_t hash = tensor.fragments.hash_of_boxes();
  const auto seen = good_.find(hash);
  const bool is_known = seen != good_.end() && seen->second->shape == tensor.shape &&
                        seen->second->fragments.has_boxes_of(tensor.fragments);
  if (!is_known) TRY(check_cover(tensor));
  good_.emplace(hash, &tensor);
  return {};
}

std::vector<TensorFault> tensor_faults(const Catalog& catalog, bool files_too) {
  std::vector<TensorFault> out;
  CoverChecker covers;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    const Tensor& tensor = catalog.tensors()[i];
    Status good = covers.check(tensor);
    if (good) good = check_replicas(tensor);
    if (good && files_too) good = check_places(catalog, tensor);
    if (!good) out.push_back({i, std::move(good).error()});
  }
  return out;
}

std::vector<std::string> tensors_without_data(const Catalog& catalog) {
  std::set<std::string> names;
  for (const UnreadFile& file : catalog.unread_files) names.insert(file.tensors.begin(), file.tensors.end());
  for (const TensorFault& fault : tensor_faults(catalog, false)) names.insert(catalog.tensors()[fault.tensor].name);
  std::vector<std::string> out(names.begin(), names.end());
  std::sort(out.begin(), out.end(), natural_less);
  return out;
}

std::vector<Index> bytes_needed(const Catalog& catalog) {
  std::vector<Index> needed(catalog.files.size(), 0);
  const auto need = [&](const Extent& e) {
    needed[e.file] = std::max(needed[e.file], checked_add(e.offset, e.length).value_or(INT64_MAX));
  };
  for (const Tensor& t : catalog.tensors())
    for (const FragmentList* list : {&t.fragments, &t.replicas})
      for (std::size_t i = 0; i < list->size(); ++i) need(list->extent(i));
  for (const Blob& b : catalog.blobs) {
    need(b.extent);
    for (const Extent& copy : b.copies) need(copy);
  }
  return needed;
}

Status validate(const Catalog& catalog, bool files_too) {
  CoverChecker covers;
  for (const Tensor& tensor : catalog.tensors()) {
    TRY(covers.check(tensor).context(catalog.root));
    TRY(check_replicas(tensor).context(catalog.root));
    if (files_too) TRY(check_places(catalog, tensor));
  }
  if (!files_too) return {};
  for (const Blob& blob : catalog.blobs) {
    TRY(check_file_range(catalog, blob.extent, "object '" + printable(blob.name) + "'"));
    for (const Extent& copy : blob.copies)
      TRY(check_file_range(catalog, copy, "object '" + printable(blob.name) + "'"));
  }
  return {};
}

Status check_extents_disjoint(const Catalog& catalog, SharedExtents shared) {
  if (catalog.shares_extents) return {};
  constexpr std::uint32_t kBlob = 0xffffffff;
  struct Claim {
    Index offset = 0;
    Index length = 0;
    std::uint32_t tensor = kBlob;  // fragment or blob
    std::uint32_t i = 0;           // fragment, or blob
  };
  const auto each_claim = [&](auto visit) {
    for (std::size_t t = 0; t < catalog.tensors().size(); ++t) {
      const FragmentList& list = catalog.tensors()[t].fragments;
      for (std::size_t i = 0; i < list.size(); ++i)
        if (const Extent& e = list.extent(i); e.length > 0)
          visit(e.file, Claim{e.offset, e.length, static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(i)});
    }
    for (std::size_t i = 0; i < catalog.blobs.size(); ++i)
      if (const Extent& e = catalog.blobs[i].extent; e.length > 0)
        visit(e.file, Claim{e.offset, e.length, kBlob, static_cast<std::uint32_t>(i)});
  };
  // Groups the claims by file with a counting sort: there are many files with few claims each.
  std::vector<std::size_t> ends(catalog.files.size() + 1, 0);
  each_claim([&](std::uint32_t file, const Claim&) { ++ends[file + 1]; });
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::vector<Claim> claims(ends.back());
  each_claim([&](std::uint32_t file, const Claim& claim) { claims[ends[file]++] = claim; });

  const auto name = [&](const Claim& c) {
    if (c.tensor == kBlob) return "object '" + printable(catalog.blobs[c.i].name) + "'";
    const Tensor& t = catalog.tensors()[c.tensor];
    return name_of(t, t.fragments.box(c.i));
  };
  std::size_t begin = 0;
  for (std::uint32_t file = 0; file < catalog.files.size(); ++file) {
    const std::size_t end = ends[file];
    std::sort(claims.begin() + begin, claims.begin() + end, [](const Claim& a, const Claim& b) {
      return std::tie(a.offset, a.length, a.tensor, a.i) < std::tie(b.offset, b.length, b.tensor, b.i);
    });
    for (std::size_t k = begin + 1; k < end; ++k) {
      const Claim &a = claims[k - 1], &b = claims[k];
      if (b.offset - a.offset >= a.length) continue;
      const bool tied = a.offset == b.offset && a.length == b.length && a.tensor != kBlob && b.tensor != kBlob &&
                        a.tensor != b.tensor;
      if (tied && shared == SharedExtents::kTies) continue;
      return corrupt(at(catalog.file_path(file), b.offset) + ": " + name(a) + " and " + name(b) +
                     " claim the same bytes");
    }
    begin = end;
  }
  return {};
}

}  // namespace reshard
