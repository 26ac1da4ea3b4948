// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/conversion_source.h"

#include "lib/device/copy.h"

namespace reshard {

namespace {

// The view in which values are computed.
const Catalog& computed_view(const Draft& draft) { return draft.undivided ? *draft.undivided : draft.view.catalog; }

// The view before values change.
const Catalog& view_before_changes(const Draft& draft) {
  return draft.changes.before ? *draft.changes.before : computed_view(draft);
}

// Reads a box of a tensor whose last dimension is divided into `columns` from `source`, where it is not.
Status read_divided(TensorSource& source, std::size_t tensor, Index columns, const Box& box, MutableBytes out,
                    MutableBytes scratch) {
  const int last = box.rank() - 1;
  const auto without_last = [last](const Dims& dims) {
    return Dims(dims.span().first(static_cast<std::size_t>(last)));
  };
  Box whole{without_last(box.origin), without_last(box.shape)};
  whole.origin[last - 1] *= columns;
  whole.shape[last - 1] *= columns;
  if (box.shape[last] == columns) return source.read(tensor, whole, out, scratch);
  const Index width = byte_size(source.catalog().tensors()[tensor].dtype);
  std::vector<std::byte> rows(volume(whole) * width);
  TRY(source.read(tensor, whole, rows, scratch));
  Dims all = box.shape;
  all[last] = columns;
  copy_box(box.shape, width, rows.data() + box.origin[last] * width, row_major_strides(all), out.data(),
           row_major_strides(box.shape));
  return {};
}

// Returns the view's tensors as they are stored in files: before a merge, or before quantization changes.
const Catalog& tensors_in_files(const Draft& draft) {
  if (draft.merge) return draft.merge->stored;
  if (draft.requantized.stored) return *draft.requantized.stored;
  return view_before_changes(draft);
}

}  // namespace

ConversionSource::ConversionSource(const Draft& draft, Reader& source, Reader& adapter, bool check)
    : computes_(draft.computes()),
      merges_adapter_(draft.adapter && draft.adapter->is_merged()),
      unpacks_(draft.unpacking != nullptr),
      changes_(draft.changes.before != nullptr),
      divides_(draft.undivided != nullptr),
      packed_(source.catalog(), source.files(), check),
      stored_(tensors_in_files(draft), source.files(), check),
      operands_(adapter.catalog(), adapter.files(), check),
      plain_(view_before_changes(draft), stored_.tensors()),
      computed_(view_before_changes(draft), plain_),
      changed_(computed_view(draft), computed_),
      divided_(draft.view.catalog, changes_ ? changed_ : computed_) {
  set_requantized(draft.requantized, stored_.tensors(), plain_);
  if (unpacks_) draft.unpacking->set(packed_.tensors(), stored_.tensors(), plain_);
  if (merges_adapter_) merge_adapter(*draft.adapter, plain_, operands_.tensors(), computed_);
  if (draft.merge) merge(draft, check);
  set_changed(draft.changes, computed_, changed_);
  if (!divides_) return;
  TensorSource& whole = changes_ ? changed_ : computed_;
  for (std::size_t i = 0; i < draft.view.catalog.tensors().size(); ++i)
    if (const Index columns = draft.view.catalog.tensors()[i].columns; columns != draft.undivided->tensors()[i].columns)
      divided_.set(i, [&whole, i, columns](const Box& box, MutableBytes out, MutableBytes scratch) {
        return read_divided(whole, i, columns, box, out, scratch);
      });
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
  if (divides_) return divided_;
  if (changes_) return changed_;
  return computes_ ? computed_ : stored_.tensors();
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
