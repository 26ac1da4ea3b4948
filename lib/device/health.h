// Numeric health of a tensor: how many of its elements are NaN, infinite or zero, how large they get, and which of its
// rows are all zero or hold one value. Counted at the speed of the digest, while the bytes are in cache.
//
// A tensor arrives as boxes, in any order and from several threads; what comes out depends on neither. The common case,
// in which every element is finite, is one vectorised loop over the bit patterns:
//
//   magnitude = bits without the sign          zero: magnitude == 0        largest: the greatest magnitude
//   constant:   no bit differs from the first element's
//
// Only a run whose largest magnitude is not finite is looked at again, to tell NaN from infinity. Patterns of one byte
// for which this does not hold (integers, float8 kinds without a sign or with one NaN) are counted by pattern.
//
// A complex element is taken as its two parts.
//
// Beside that, elements may be counted by their exponents, whose bits are the number of a counter.
#pragma once

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard {

// What a run of elements holds.
struct RunHealth {
  Index nans = 0;
  Index infs = 0;
  Index zeros = 0;              // of either sign
  double absmax = 0;            // of the finite elements
  Index first_not_finite = -1;  // number of the first NaN or infinity in the run; -1: there is none
  std::uint64_t first = 0;      // the bits of the first element
  bool constant = true;         // whether all elements have the bits of the first

  friend bool operator==(const RunHealth&, const RunHealth&) = default;
};

// run.size() is a multiple of the dtype's bytes. The run needs no alignment.
RunHealth scan_run(DType dtype, Bytes run);

struct HealthVariant {
  std::string_view name;  // "portable", "avx2", "avx512"
  RunHealth (*scan)(DType dtype, Bytes run);
};

// What this machine can run, the portable one first; the last is what scan_run() uses. For tests and benchmarks.
std::vector<HealthVariant> health_variants();

// Rows of one kind, in ranges.
struct RowRange {
  Index begin = 0;
  Index end = 0;
  friend bool operator==(const RowRange&, const RowRange&) = default;
};
struct RowSet {
  static constexpr std::size_t kMaxRanges = 64;
  Index count = 0;
  std::vector<RowRange> ranges;  // ascending; the first kMaxRanges, `count` counts them all

  void add(Index row);  // in ascending order
  friend bool operator==(const RowSet&, const RowSet&) = default;
};

// Rows of one value each; a row of zeros is in the first only.
struct RowHealth {
  RowSet zero;
  RowSet constant;
  friend bool operator==(const RowHealth&, const RowHealth&) = default;
};

// How many elements there are of each order of magnitude 2^e <= |x| < 2^(e + 1): all that are finite and not zero. The
// subnormal ones of a type all count for the exponent below that of its least normal number, and what lies beyond the
// ends (of a float64) for the ends.
struct Exponents {
  static constexpr int kLeast = -127;
  static constexpr int kCount = 256;

  int first = 0;              // e of the first count
  std::vector<Index> counts;  // up to the last that is not 0; empty where nothing is counted, as of integers

  friend bool operator==(const Exponents&, const Exponents&) = default;
};

struct TensorHealth {
  Index elements = 0;  // looked at
  Index nans = 0;
  Index infs = 0;
  Index zeros = 0;
  double absmax = 0;                // of the finite elements
  Index first_not_finite_row = -1;  // along dimension 0; -1: every element is finite
  bool constant = true;             // every element has the same bits
  bool rows_seen = false;           // whether `rows` and `tail` were looked for
  RowHealth rows;                   // rows before the split
  RowHealth tail;                   // and from it on
  Exponents exponents;              // where they are counted, once every element was added

  friend bool operator==(const TensorHealth&, const TensorHealth&) = default;
};

// Gathers one tensor's health. A row is an index of dimension 0; rows are looked for in tensors of two dimensions and
// more whose rows have kMinRowElements at least (fewer are equal by chance) and that have kMaxRows at most.
class HealthScan {
 public:
  static constexpr Index kMinRowElements = 16;
  static constexpr Index kMaxRows = Index{1} << 24;

  // `split`: the row from which on rows are counted apart, as those that pad a vocabulary are; -1: none are.
  // `exponents`: whether they are counted, which takes longer than all the rest.
  HealthScan(DType dtype, const Dims& shape, Index split = -1, bool exponents = false);

  // Adds the elements of `box`, row-major. Boxes lie inside the tensor and do not overlap. Thread-safe.
  void add(const Box& box, Bytes elements);

  // What was seen; complete once every element was added.
  TensorHealth health() const;

  // The most bytes the rows of such a tensor take while it is being added.
  static Index row_memory(const Dims& shape);

 private:
  // A row, or a stretch of one.
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
  Index row_elements_ = 0;  // 0: rows are not looked for
  bool exponents_ = false;

  mutable std::mutex mutex_;
  TensorHealth total_;
  std::uint64_t value_ = 0;         // the bits of the elements, as long as total_.constant
  std::vector<Index> by_exponent_;  // while elements are missing: of each of the kCount exponents
  // While rows are missing. The values are for rows that arrive in several parts.
  std::vector<bool> not_zero_, not_constant_;
  std::vector<std::uint64_t> values_;
  std::vector<bool> has_value_;
};

}  // namespace reshard
