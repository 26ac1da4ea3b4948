// SPDX-License-Identifier: Apache-2.0
// A model to be written as torch_dist (dist_target.cc) or as per-rank files (legacy_target.cc).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/megatron/arguments.h"
#include "formats/megatron/names.h"
#include "formats/megatron/run_state.h"
#include "lib/checkpoint/format.h"

namespace reshard::megatron {

// The model of a request, with everything that both forms need.
struct WrittenModel {
  // The parameter, and the state of it, that a tensor of the request is.
  struct Part {
    StateKey key;
    CoreName name;
  };
  Arguments args;               // with the mesh's degrees
  std::optional<RunState> run;  // nothing if only weights are written
  Index layers = 0, experts = 0;
  Index tp = 1, pp = 1, ep = 1;
  std::vector<Part> parts;  // of the request's tensors, in order

  bool shares_experts() const { return ep > 1; }  // then experts have an optimizer of their own
  std::string latest() const;                     // "10", "release"
  std::string directory() const;                  // "iter_0000010/"

  // Reads a request. Fails with a usage error without a config.json, or if the mesh does not divide the model. Fails
  // with kUnsupported for models and names that Megatron does not have, for a part of a model, and for optimizer state
  // other than Adam's.
  static Result<WrittenModel> read(const LayoutRequest& request);
};

}  // namespace reshard::megatron
