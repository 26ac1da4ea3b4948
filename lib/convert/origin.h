// Where a conversion's tensors are read from: the source's files, and what is computed of them and an adapter's.
#pragma once

#include <vector>

#include "lib/convert/conversion.h"
#include "lib/engine/checked_source.h"
#include "lib/engine/computed_source.h"

namespace reshard {

class Origin {
 public:
  // Refers to all. `adapter` is the reader that an adapter's matrices are in. With `check`, checksums are held before
  // anything is given out (checked_source.h).
  Origin(const Draft& draft, Reader& source, Reader& adapter, bool check = false)
      : merges_(draft.adapter && !draft.adapter->merged.empty()),
        computes_(merges_ || draft.scales.stored),
        stored_(draft.scales.stored ? *draft.scales.stored : draft.view.catalog, source.files()),
        operands_(adapter.catalog(), adapter.files()),
        checked_(stored_, source.files()),
        checked_operands_(operands_, adapter.files()),
        tensors_(check ? static_cast<TensorSource&>(checked_) : stored_),
        computed_(draft.view.catalog, tensors_) {
    set_scaled(draft.scales, tensors_, computed_);
    TensorSource& operands = check ? static_cast<TensorSource&>(checked_operands_) : operands_;
    if (merges_) merge_adapter(*draft.adapter, tensors_, operands, computed_);
  }
  bool computes() const { return computes_; }
  TensorSource& tensors() { return computes_ ? computed_ : tensors_; }
  // That the checksums of an adapter hold, too.
  Status finish() {
    if (!merges_) return {};
    std::vector<std::byte> scratch(std::size_t{1} << 20);
    return operands_.finish(scratch, nullptr);
  }
  Index checksums_checked() const { return stored_.checksums_checked() + operands_.checksums_checked(); }

 private:
  bool merges_, computes_;
  FileSource stored_, operands_;
  CheckedSource checked_, checked_operands_;
  TensorSource& tensors_;
  ComputedSource computed_;
};

}  // namespace reshard
