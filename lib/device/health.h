// SPDX-License-Identifier: Apache-2.0
// Numeric health of a tensor: how many elements are NaN, infinite or zero, the largest magnitude, and which rows are
// all zero or constant. Computed at the speed of the digest, while the bytes are in cache.
//
// A tensor arrives as boxes, in any order and from several threads; the result does not depend on either. In the common
// case every element is finite, and one vectorised loop over the bit patterns suffices:
//
//   magnitude = bits without the sign          zero: magnitude == 0        largest: the greatest magnitude
//   constant:   no bit differs from the first element's
//
// Only if the largest magnitude of a run is not finite is it scanned again, to tell NaN from infinity. One-byte types
// to which this does not apply (integers, float8 types without a sign or with a single NaN) are counted by bit pattern.
//
// A complex element counts as its two parts.
//
// Optionally counts elements by exponent.
#pragma once

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard {

// The health of a run of elements.
struct RunHealth {
  Index nans = 0;
  Index infs = 0;
  Index zeros = 0;              // of either sign
  double absmax = 0;            // of the finite elements
  Index first_not_finite = -1;  // index of the first NaN or infinity in the run; -1: none
  std::uint64_t first = 0;      // the bits of the first element
  bool constant = true;         // whether all elements have the bits of the first

  friend bool operator==(const RunHealth&, const RunHealth&) = default;
};

// run.size() must be a multiple of the dtype's size. The run needs no alignment.
RunHealth scan_run(DType dtype, Bytes run);

struct HealthVariant {
  std::string_view name;  // "portable", "avx2", "avx512"
  RunHealth (*scan)(DType dtype, Bytes run);
};

// Returns the implementations that this machine can run, the portable one first; scan_run() uses the last. For tests
// and benchmarks.
std::vector<HealthVariant> health_variants();

// A range [begin, end) of rows.
struct RowRange {
  Index begin = 0;
  Index end = 0;
  friend bool operator==(const RowRange&, const RowRange&) = default;
};
struct RowSet {
  static constexpr std::size_t kMaxRanges = 64;
  Index count = 0;
  std::vector<RowRange> ranges;  // ascending; only the first kMaxRanges, while `count` includes all

  void add(Index row);  // rows must be added in ascending order
  friend bool operator==(const RowSet&, const RowSet&) = default;
};

// Rows that hold a single value. A row of zeros is only in `zero`.
struct RowHealth {
  RowSet zero;
  RowSet constant;
  friend bool operator==(const RowHealth&, const RowHealth&) = default;
};

// Counts of the finite nonzero elements by magnitude, 2^e <= |x| < 2^(e + 1). All subnormal numbers of a type count for
// the exponent below that of its smallest normal number. Exponents outside the range (of a float64) count for its ends.
struct Exponents {
  static constexpr int kLeast = -127;
  static constexpr int kCount = 256;

  int first = 0;              // e of the first count
  std::vector<Index> counts;  // without trailing zeros; empty if not counted, as for integers

  friend bool operator==(const Exponents&, const Exponents&) = default;
};

struct TensorHealth {
  Index elements = 0;  // elements seen
  Index nans = 0;
  Index infs = 0;
  Index zeros = 0;
  double absmax = 0;                // of the finite elements
  Index first_not_finite_row = -1;  // index in dimension 0; -1: every element is finite
  bool constant = true;             // all elements have the same bits
  bool rows_seen = false;           // whether `rows` and `tail` were computed
  RowHealth rows;                   // rows before the split
  RowHealth tail;                   // rows from the split on
  Exponents exponents;              // if requested, once every element was added

  friend bool operator==(const TensorHealth&, const TensorHealth&) = default;
};

// Accumulates one tensor's health. A row is an index of dimension 0. Rows are examined in tensors of at least two
// dimensions with at least kMinRowElements elements per row (shorter rows are equal by chance) and at most kMaxRows
// rows.
class HealthScan {
 public:
  static constexpr Index kMinRowElements = 16;
  static constexpr Index kMaxRows = Index{1} << 24;

  // `split` is the first row to be counted separately, such as the rows that pad a vocabulary; -1 for none. `exponents`
  // requests counts by exponent, which take longer than all the rest.
  HealthScan(DType dtype, const Dims& shape, Index split = -1, bool exponents = false);

  // Adds the elements of `box`, row-major. Boxes must be inside the tensor and not overlap. Thread-safe.
  void add(const Box& box, Bytes elements);

  // Returns the health of the elements added so far.
  TensorHealth health() const;

  // Returns the most bytes that the row state of such a tensor takes.
  static Index row_memory(const Dims& shape);

 private:
  // A row, or part of one.
  struct RowPart {
    std::uint64_t value = 0;  // the bits of its first element
    bool zero = false;
    bool constant = false;
  };
  RunHealth scan_rows(const Box& box, Bytes elements);
  void add_rows(Index first_row, const std::vector<RowPart>& parts, bool whole_rows);
  void add_exponents(Bytes elements);
  void add_total(const RunHealth& run, Index elements, const Box& box);
  void close_rows();
  void close_exponents();

  DType dtype_;
  Dims shape_;
  Index split_;
  Index row_elements_ = 0;  // 0: rows are not examined
  bool exponents_ = false;

  mutable std::mutex mutex_;
  TensorHealth total_;
  std::uint64_t value_ = 0;         // the bits of all elements, if total_.constant
  std::vector<Index> by_exponent_;  // counts for the kCount exponents, until all elements were added
  // Row state, until all rows were added. Values are kept for rows that arrive in several parts.
  std::vector<bool> not_zero_, not_constant_;
  std::vector<std::uint64_t> values_;
  std::vector<bool> has_value_;
};

}  // namespace reshard
