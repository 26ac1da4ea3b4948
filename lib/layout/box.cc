// SPDX-License-Identifier: Apache-2.0
#include "lib/layout/box.h"

namespace reshard {

std::string to_string(const Dims& dims) {
  std::string out = "[";
  for (int d = 0; d < dims.rank(); ++d) out += (d ? ", " : "") + std::to_string(dims[d]);
  return out + "]";
}

Index volume(const Dims& shape) {
  Index v = 1;
  for (const Index extent : shape) v *= extent;
  return v;
}

std::optional<Index> checked_volume(const Dims& shape) {
  // A zero extent must not hide an overflow of the others, because strides are computed from them too.
  Index nonzero = 1;
  bool zero = false;
  for (const Index extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      zero = true;
      continue;
    }
    const auto product = checked_mul(nonzero, extent);
    if (!product) return std::nullopt;
    nonzero = *product;
  }
  return zero ? 0 : nonzero;
}

Dims row_major_strides(const Dims& shape) {
  Dims strides = shape;
  Index step = 1;
  for (int d = shape.rank() - 1; d >= 0; --d) {
    strides[d] = step;
    step *= shape[d];
  }
  return strides;
}

bool Box::empty() const {
  return std::any_of(shape.begin(), shape.end(), [](Index extent) { return extent <= 0; });
}

Box whole(const Dims& shape) { return {Dims::filled(shape.rank(), 0), shape}; }

Index volume(const Box& box) { return volume(box.shape); }

Box intersect(const Box& a, const Box& b) {
  Box out = a;
  for (int d = 0; d < a.rank(); ++d) {
    const Index begin = std::max(a.begin(d), b.begin(d));
    out.origin[d] = begin;
    out.shape[d] = std::max<Index>(0, std::min(a.end(d), b.end(d)) - begin);
  }
  return out;
}

bool contains(const Box& outer, const Box& inner) {
  for (int d = 0; d < outer.rank(); ++d)
    if (!fits_inside(inner.begin(d) - outer.begin(d), inner.shape[d], outer.shape[d])) return false;
  return true;
}

std::string to_string(const Box& box) {
  std::string out = "[";
  for (int d = 0; d < box.rank(); ++d)
    out += (d ? ", " : "") + std::to_string(box.begin(d)) + ":" + std::to_string(box.end(d));
  return out + "]";
}

}  // namespace reshard
