// SPDX-License-Identifier: Apache-2.0
// The tensors that a conversion reads: those of the source's files, and those computed from them, from an adapter or
// from the other sources of a merge.
#pragma once

#include <memory>
#include <vector>

#include "lib/convert/draft.h"
#include "lib/source/checked_source.h"
#include "lib/source/computed_source.h"

namespace reshard {

class ConversionSource {
 public:
  // All arguments must outlive it. `adapter` is the reader of an adapter's matrices. With `check`, checksums are
  // verified before any byte is returned (checked_source.h).
  ConversionSource(const Draft& draft, Reader& source, Reader& adapter, bool check = false)
      : merges_adapter_(draft.adapter && draft.adapter->is_merged()),
        unpacks_(draft.unpacking != nullptr),
        changes_(draft.changes.before != nullptr),
        computes_(merges_adapter_ || draft.requantized.stored || unpacks_ || draft.merge || changes_),
        before_(changes_ ? *draft.changes.before : draft.view.catalog),
        packed_(source.catalog(), source.files()),
        stored_(draft.merge                ? draft.merge->stored
                : draft.requantized.stored ? *draft.requantized.stored
                                           : before_,
                source.files()),
        operands_(adapter.catalog(), adapter.files()),
        checked_(stored_, source.files()),
        checked_operands_(operands_, adapter.files()),
        checked_packed_(packed_, source.files()),
        tensors_(check ? static_cast<TensorSource&>(checked_) : stored_),
        plain_(before_, tensors_),
        computed_(before_, plain_),
        changed_(draft.view.catalog, computed_) {
    set_requantized(draft.requantized, tensors_, plain_);
    TensorSource& packed = check ? static_cast<TensorSource&>(checked_packed_) : packed_;
    if (draft.unpacking) draft.unpacking->set(packed, tensors_, plain_);
    TensorSource& operands = check ? static_cast<TensorSource&>(checked_operands_) : operands_;
    if (merges_adapter_) merge_adapter(*draft.adapter, plain_, operands, computed_);
    if (draft.merge) merge(draft, check);
    set_changed(draft.changes, computed_, changed_);
  }
  ConversionSource(const ConversionSource&) = delete;
  ConversionSource& operator=(const ConversionSource&) = delete;

  bool computes() const { return computes_; }
  TensorSource& tensors() {
    if (changes_) return changed_;
    return computes_ ? computed_ : tensors_;
  }
  // The sources of a merge, this one first; empty if it is not a merge. digests() are those of what was read from each.
  const std::vector<TensorSource*>& merged() const { return merged_; }
  MergeDigests* digests() { return digests_.get(); }
  // Verifies the checksums of an adapter and of the other sources. All ranks must call it.
  Status finish(Transport* ranks) {
    std::vector<std::byte> scratch(std::size_t{1} << 20);
    if (merges_adapter_) TRY(operands_.finish(scratch, ranks));
    if (unpacks_) TRY(packed_.finish(scratch, ranks));
    for (const auto& other : others_) TRY(other->tensors().finish(scratch, ranks));
    return digests_ ? digests_->add_up(ranks) : Status();
  }
  Index checksums_checked() const {
    Index sum = stored_.checksums_checked() + operands_.checksums_checked() + packed_.checksums_checked();
    for (const auto& other : others_) sum += other->checksums_checked();
    return sum;
  }

 private:
  void merge(const Draft& draft, bool check) {
    const Merge& merge = *draft.merge;
    digests_ = std::make_unique<MergeDigests>(merge);
    merged_ = {&tensors_};
    for (std::size_t s = 0; s < draft.others.size(); ++s) {
      Reader& reader = *merge.options.sources[s + 1].reader;
      others_.push_back(std::make_unique<ConversionSource>(*draft.others[s], reader, reader, check));
      merged_.push_back(&others_.back()->tensors());
    }
    set_merged(merge, merged_, *digests_, computed_);
  }

  bool merges_adapter_, unpacks_, changes_, computes_;
  const Catalog& before_;  // the view before values change
  FileSource packed_, stored_, operands_;
  CheckedSource checked_, checked_operands_, checked_packed_;
  TensorSource& tensors_;
  ComputedSource plain_;  // with quantized weights in the output's form
  ComputedSource computed_;
  ComputedSource changed_;
  std::vector<std::unique_ptr<ConversionSource>> others_;
  std::vector<TensorSource*> merged_;
  std::unique_ptr<MergeDigests> digests_;
};

}  // namespace reshard
