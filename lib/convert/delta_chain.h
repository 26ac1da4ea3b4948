// SPDX-License-Identifier: Apache-2.0
// Deltas: checkpoints that hold the exclusive or of a model's new and old bits, so that the old model and the delta
// give the new one.
//
// `reshard delta` writes one as the merge "new ^ old", and its manifest records the digests of both. `reshard patch` is
// the merge "base ^ delta ^ delta ...". The records prove that a delta is applied to its own base, and that the result
// is the new model, before the output appears. Deltas that trainers publish (weights/published_delta.h) record
// checksums of the new model instead, so the base and they are read once more before the output is begun.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/convert/conversion.h"
#include "lib/convert/conversion_source.h"

namespace reshard {

// Returns the options that write a delta from `old_path` to `new_path`, and those that apply deltas to a base. No
// source is open.
MergeOptions delta_options(const std::string& old_path, const std::string& new_path);
MergeOptions patch_options(const std::string& base, const std::vector<std::string>& deltas);

class DeltaChain {
 public:
  // Reads the records of the deltas: the sources of `merge`, all open, after the first. Fails (unsupported) if one is
  // not a delta, or was made from another version, and (usage) if one was not made from the result of the one before
  // it.
  static Result<DeltaChain> open(const MergeOptions& merge);

  // Fails (unsupported) if one of the base's smallest tensors is not what the first delta was made from. Reads at most
  // 16 MiB, so that a wrong base is found before all of it has been read. If there are published deltas: reads
  // everything, and fails if a tensor has not the checksum that they record; with deltas of both kinds also if a tensor
  // changes its dtype. All ranks must call it.
  Status check_start(const Conversion& patch, const ConversionSource& source, RunOptions run) const;

  // Fails (unsupported) if the base that was read is another than the first delta was made from, (corrupt) if what was
  // read of a delta is not what was written, or if the result is not the new model. `proofs` are those of the plan's
  // tensors.
  Status check(const Conversion& patch, const std::vector<TensorProof>& proofs, const MergeDigests& read) const;

 private:
  // A delta that reshard wrote.
  struct Link {
    std::size_t source = 0;          // its number among the sources; the base is 0
    std::string path;                // of the delta
    std::string old_path, new_path;  // of the models that it was made from, as recorded
    Json tensors;                    // the manifest's
  };
  // Take the delta that is source `s` of the merge, after those before it.
  Status add_link(const MergeOptions& merge, std::size_t s);
  Status add_published(const MergeOptions& merge, std::size_t s);
  bool is_changed_later(const std::string& tensor) const;
  Status check_base(const std::string& tensor, const Digest& digest) const;
  Status check_dtypes(const Conversion& patch) const;

  std::string base_;
  std::vector<Link> links_;
  std::vector<Reader*> deltas_;  // of both kinds, in their order
  bool is_published_ = false;    // whether one of them is published
  Reader* base_reader_ = nullptr;
};

}  // namespace reshard
