// SPDX-License-Identifier: Apache-2.0
#include "lib/source/pieces.h"

#include <algorithm>

namespace reshard {
namespace {

// If its runs are this long, a span that is mostly gaps is not read as a whole.
constexpr Index kLongRun = 4 << 10;
constexpr Index kMaxWaste = 4;

Piece make_piece(std::size_t number, const Fragment& f, const Box& box, Index element_bytes) {
  Piece p;
  p.fragment = number;
  p.extent = f.extent;
  p.big_endian = f.big_endian;
  p.box = box;
  p.strides = f.strides;
  Index first = 0, last = 0;  // elements
  for (int d = 0; d < box.rank(); ++d) {
    first += (box.begin(d) - f.box.begin(d)) * f.strides[d];
    last += (box.shape[d] - 1) * f.strides[d];
  }
  p.begin = f.start + first * element_bytes;
  p.end = p.begin + (last + 1) * element_bytes;
  return p;
}

StoredPiece stored(const Piece& p) { return {p.box, p.extent.file, p.extent.offset + p.begin}; }

// Returns the dimension along which halving shortens the span most.
int widest_dimension(const Piece& p) {
  int widest = 0;
  Index reach = -1;
  for (int d = 0; d < p.box.rank(); ++d)
    if (const Index r = (p.box.shape[d] - 1) * p.strides[d]; r > reach) {
      reach = r;
      widest = d;
    }
  return widest;
}

void cut_to_fit(const Fragment& f, const Piece& p, Index element_bytes, Index max_span, std::vector<Piece>& out) {
  const Index span = p.end - p.begin;
  const Index used = volume(p.box) * element_bytes;
  const int d = p.box.rank() > 0 ? widest_dimension(p) : 0;
  const bool sparse = span > kMaxWaste * used && p.box.rank() > 0 && used / p.box.shape[d] >= kLongRun;
  if (p.box.rank() == 0 || p.box.shape[d] == 1 || (span <= max_span && !sparse)) {
    out.push_back(p);
    return;
  }
  Box half = p.box;
  half.shape[d] /= 2;
  cut_to_fit(f, make_piece(p.fragment, f, half, element_bytes), element_bytes, max_span, out);
  half.origin[d] += half.shape[d];
  half.shape[d] = p.box.shape[d] - half.shape[d];
  cut_to_fit(f, make_piece(p.fragment, f, half, element_bytes), element_bytes, max_span, out);
}

// Appends the pieces of `p` in bytes [begin, end) of its extent.
void cut_between(const Fragment& f, const Piece& p, Index element_bytes, Index begin, Index end,
                 std::vector<Piece>& out) {
  if (p.end <= begin || p.begin >= end) return;
  int d = -1;  // the dimension with the widest stride, among those with more than one index
  for (int k = 0; k < p.box.rank(); ++k)
    if (p.box.shape[k] > 1 && (d < 0 || p.strides[k] > p.strides[d])) d = k;
  if ((p.begin >= begin && p.end <= end) || d < 0 || p.strides[d] == 0) {
    out.push_back(p);
    return;
  }
  const Index n = p.box.shape[d], step = p.strides[d] * element_bytes;
  const Index within = p.end - p.begin - (n - 1) * step;  // bytes spanned by one index
  const auto part = [&](Index first, Index last) {
    if (first >= last) return;
    Box box = p.box;
    box.origin[d] += first;
    box.shape[d] = last - first;
    cut_between(f, make_piece(p.fragment, f, box, element_bytes), element_bytes, begin, end, out);
  };
  // Index i spans [p.begin + i * step, p.begin + i * step + within). Find the indices that overlap the interval and
  // those inside it.
  const Index first = p.begin + within > begin ? 0 : (begin - p.begin - within) / step + 1;
  const Index last = std::min(n, ceil_div(end - p.begin, step));
  const Index first_inside = std::clamp(begin > p.begin ? ceil_div(begin - p.begin, step) : 0, first, last);
  const Index last_inside =
      end - p.begin < within ? first_inside : std::clamp((end - p.begin - within) / step + 1, first_inside, last);
  for (Index i = first; i < first_inside; ++i) part(i, i + 1);
  part(first_inside, last_inside);
  for (Index i = last_inside; i < last; ++i) part(i, i + 1);
}

}  // namespace

bool is_one_run(const Dims& shape, const Dims& strides) {
  Index step = 1;
  for (int d = shape.rank() - 1; d >= 0; --d) {
    if (shape[d] == 1) continue;
    if (strides[d] != step) return false;
    step *= shape[d];
  }
  return true;
}

bool is_one_run(const PieceGroup& group, const Dims& memory_strides) {
  const Piece& first = group.pieces.front();
  return group.pieces.size() == 1 && is_one_run(first.box.shape, first.strides) &&
         is_one_run(first.box.shape, memory_strides);
}

bool has_gaps(const PieceGroup& group, Index element_bytes) {
  Index held = 0;
  for (const Piece& p : group.pieces) held += volume(p.box) * element_bytes;
  return held < group.length();
}

std::vector<StoredPiece> stored_pieces(const FragmentList& fragments, const FragmentIndex& index, const Box& box,
                                       Index element_bytes) {
  std::vector<StoredPiece> out;
  index.overlapping(box, [&](std::size_t i, const Box& both) {
    out.push_back(stored(make_piece(i, fragments.get(i), both, element_bytes)));
  });
  return out;
}

std::vector<PieceGroup> pieces_of(const FragmentList& fragments, const FragmentIndex& index, const Box& box,
                                  Index element_bytes, Index max_span, const PieceFilter& wanted) {
  std::vector<Piece> pieces;
  index.overlapping(box, [&](std::size_t i, const Box& both) {
    const Fragment f = fragments.get(i);
    const Piece piece = make_piece(i, f, both, element_bytes);
    if (!wanted || wanted(stored(piece))) cut_to_fit(f, piece, element_bytes, max_span, pieces);
  });
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    if (a.extent.file != b.extent.file) return a.extent.file < b.extent.file;
    if (a.extent.offset != b.extent.offset) return a.extent.offset < b.extent.offset;
    return a.begin < b.begin;
  });
  std::vector<PieceGroup> groups;
  for (const Piece& p : pieces) {
    if (!groups.empty()) {
      PieceGroup& g = groups.back();
      if (g.extent == p.extent && p.begin <= g.end && std::max(g.end, p.end) - g.begin <= max_span) {
        g.end = std::max(g.end, p.end);
        g.pieces.push_back(p);
        continue;
      }
    }
    groups.push_back({p.extent, p.begin, p.end, {p}});
  }
  return groups;
}

std::vector<Piece> pieces_between(const FragmentList& fragments, std::size_t number, Index element_bytes, Index begin,
                                  Index end) {
  std::vector<Piece> out;
  const Fragment f = fragments.get(number);
  if (!f.box.empty()) cut_between(f, make_piece(number, f, f.box, element_bytes), element_bytes, begin, end, out);
  return out;
}

Index offset_in(const Box& box, const Dims& strides, const Box& part) {
  Index offset = 0;
  for (int d = 0; d < box.rank(); ++d) offset += (part.begin(d) - box.begin(d)) * strides[d];
  return offset;
}

}  // namespace reshard
