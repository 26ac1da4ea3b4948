// SPDX-License-Identifier: Apache-2.0
// The manifest that reshard wrote with a checkpoint, to check what a conversion reads from it.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/checkpoint/format.h"
#include "lib/engine/run.h"
#include "lib/model/model.h"
#include "lib/plan/plan.h"

namespace reshard {

class SourceManifest {
 public:
  // Opens the manifest of `source` for a conversion that reads the tensors of `plan` in `view`; all three must outlive
  // it. Returns nothing if there is no manifest, or if recorded checksums cover all data. Fails (corrupt or
  // unsupported) if the manifest cannot be used.
  static Result<std::optional<SourceManifest>> open(Reader& source, const Plan& plan, const Catalog& view,
                                                    Families families);

  // Compares the digests of `proofs`, which are those of the plan's tensors, with the manifest. Returns how many were
  // compared. Skips tensors with recorded checksums, and files whose length is not the recorded one, since another
  // program has written them. Reads a tensor again if the manifest records it in another order of elements. Fails
  // (corrupt), naming the tensor, if a digest differs. All ranks must call it.
  Result<Index> check(const std::vector<TensorProof>& proofs, const Model& model, RunOptions options) const;

 private:
  SourceManifest(Reader& source, std::string path, Json manifest, const Plan& plan, const Catalog& view,
                 Families families)
      : source_(&source),
        path_(std::move(path)),
        manifest_(std::move(manifest)),
        plan_(&plan),
        view_(&view),
        families_(families) {}
  const Tensor& planned(std::size_t k) const { return view_->tensors()[plan_->tensors[k].from]; }
  Result<std::set<std::uint32_t>> unchanged_files() const;
  Status compare(const Tensor& tensor, const Digest& digest) const;

  Reader* source_;
  std::string path_;
  Json manifest_;
  const Plan* plan_;
  const Catalog* view_;
  Families families_;
};

}  // namespace reshard
