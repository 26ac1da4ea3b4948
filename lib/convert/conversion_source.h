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
  ConversionSource(const Draft& draft, Reader& source, Reader& adapter, bool check = false);
  ConversionSource(const ConversionSource&) = delete;
  ConversionSource& operator=(const ConversionSource&) = delete;

  bool computes() const { return computes_; }  // as Draft::computes()
  TensorSource& tensors();
  // The sources of a merge, this one first; empty if it is not a merge. digests() are those of what was read from each.
  const std::vector<TensorSource*>& merged() const { return merged_; }
  MergeDigests* digests() { return digests_.get(); }
  // Verifies the checksums of packed weights, of an adapter and of the other sources. All ranks must call it.
  Status finish(Transport* ranks);
  Index checksums_checked() const;

 private:
  // Reads the tensors of a catalog from files.
  class Stored {
   public:
    Stored(const Catalog& catalog, FilePool& files, bool check)
        : files_(catalog, files), checked_(files_, files), check_(check) {}
    TensorSource& tensors() { return check_ ? static_cast<TensorSource&>(checked_) : files_; }
    Index checksums_checked() const { return files_.checksums_checked(); }

   private:
    FileSource files_;
    CheckedSource checked_;
    bool check_;
  };

  void merge(const Draft& draft, bool check);

  bool computes_, merges_adapter_, unpacks_, changes_, divides_;
  // Each is made of those above it:
  Stored packed_, stored_, operands_;  // in the source's files: packed weights, others; an adapter's matrices
  ComputedSource plain_;               // with weights unpacked, and quantized as the output has them
  ComputedSource computed_;            // merged with the adapter, or with the other sources
  ComputedSource changed_;             // with the values that the output's convention stores
  ComputedSource divided_;             // with columns divided as the output stores them
  std::vector<std::unique_ptr<ConversionSource>> others_;
  std::vector<TensorSource*> merged_;
  std::unique_ptr<MergeDigests> digests_;  // null: not a merge
};

}  // namespace reshard
