// What reshard recorded of a checkpoint when it wrote it, held against what a conversion has read of it.
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
  // The manifest of a source of which a conversion reads the tensors of `plan` in `view`; all of them stay the
  // caller's. Nothing where there is none, or where checksums guard all. Corrupt or Unsupported where it cannot be made
  // use of.
  static Result<std::optional<SourceManifest>> open(Reader& source, const Plan& plan, const Catalog& view,
                                                    Families families);

  // Compares digests with those of the manifest; how many there were. Tensors that checksums guard are left alone, and
  // so are files whose length is not the recorded one: they were written by another program since. What is recorded in
  // another order of elements is read once more. `proofs` are of the plan's tensors. Corrupt, naming the tensor, where
  // one differs. Of several ranks each calls it.
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
