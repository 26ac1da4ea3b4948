// What is to be written of a model, whichever way it is to lie: torch_dist (dist_target.cc) or files of ranks
// (legacy_target.cc).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/megatron/arguments.h"
#include "formats/megatron/names.h"
#include "formats/megatron/run_state.h"
#include "lib/checkpoint/format.h"

namespace reshard::megatron {

struct WrittenModel {
  // What of a parameter a tensor of the request is.
  struct Part {
    StateKey key;
    CoreName name;
  };
  Arguments args;               // with the mesh's degrees
  std::optional<RunState> run;  // nothing: weights alone
  Index layers = 0, experts = 0;
  Index tp = 1, pp = 1, ep = 1;
  std::vector<Part> parts;  // of the request's tensors, in order

  bool shares_experts() const { return ep > 1; }  // so that they have an optimizer of their own
  std::string latest() const;                     // "10", "release"
  std::string directory() const;                  // "iter_0000010/"

  // A usage error without a config.json, and for a mesh that does not divide the model. Unsupported for models and
  // names that Megatron has no words for, and for optimizer state that is not Adam's.
  static Result<WrittenModel> read(const LayoutRequest& request);
};

}  // namespace reshard::megatron
