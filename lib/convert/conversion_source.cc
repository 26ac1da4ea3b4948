// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/conversion_source.h"

namespace reshard {

namespace {

// The view before values change.
const Catalog& view_before_changes(const Draft& draft) {
  return draft.changes.before ? *draft.changes.before : draft.view.catalog;
}

// Returns the view's tensors as they are stored in files: before a merge, or before quantization changes.
const Catalog& tensors_in_files(const Draft& draft) {
  if (draft.merge) return draft.merge->stored;
  if (draft.requantized.stored) return *draft.requantized.stored;
  return view_before_changes(draft);
}

}  // namespace

ConversionSource::ConversionSource(const Draft& draft, Reader& source, Reader& adapter, bool check)
    : merges_adapter_(draft.adapter && draft.adapter->is_merged()),
      requantizes_(draft.requantized.stored != nullptr),
      unpacks_(draft.unpacking != nullptr),
      changes_(draft.changes.before != nullptr),
      packed_(source.catalog(), source.files(), check),
      stored_(tensors_in_files(draft), source.files(), check),
      operands_(adapter.catalog(), adapter.files(), check),
      plain_(view_before_changes(draft), stored_.tensors()),
      computed_(view_before_changes(draft), plain_),
      changed_(draft.view.catalog, computed_) {
  set_requantized(draft.requantized, stored_.tensors(), plain_);
  if (unpacks_) draft.unpacking->set(packed_.tensors(), stored_.tensors(), plain_);
  if (merges_adapter_) merge_adapter(*draft.adapter, plain_, operands_.tensors(), computed_);
  if (draft.merge) merge(draft, check);
  set_changed(draft.changes, computed_, changed_);
}

void ConversionSource::merge(const Draft& draft, bool check) {
  const Merge& merge = *draft.merge;
  digests_ = std::make_unique<MergeDigests>(merge);
  merged_ = {&stored_.tensors()};
  for (std::size_t s = 0; s < draft.others.size(); ++s) {
    Reader& reader = *merge.options.sources[s + 1].reader;
    others_.push_back(std::make_unique<ConversionSource>(*draft.others[s], reader, reader, check));
    merged_.push_back(&others_.back()->tensors());
  }
  set_merged(merge, merged_, *digests_, computed_);
}

TensorSource& ConversionSource::tensors() {
  if (changes_) return changed_;
  return computes() ? computed_ : stored_.tensors();
}

Status ConversionSource::finish(Transport* ranks) {
  std::vector<std::byte> scratch(std::size_t{1} << 20);
  if (merges_adapter_) TRY(operands_.tensors().finish(scratch, ranks));
  if (unpacks_) TRY(packed_.tensors().finish(scratch, ranks));
  for (const auto& other : others_) TRY(other->tensors().finish(scratch, ranks));
  return digests_ ? digests_->add_up(ranks) : Status();
}

Index ConversionSource::checksums_checked() const {
  Index sum = stored_.checksums_checked() + operands_.checksums_checked() + packed_.checksums_checked();
  for (const auto& other : others_) sum += other->checksums_checked();
  return sum;
}

}  // namespace reshard
