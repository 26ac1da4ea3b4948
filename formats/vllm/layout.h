// SPDX-License-Identifier: Apache-2.0
// Maps a model's tensors to vLLM's parameters on each worker, as described in vllm.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tensor_files/local_files.h"

namespace reshard::vllm {

inline constexpr std::string_view kEmbedding = "model.embed_tokens.weight", kHead = "lm_head.weight";

struct Rule;

// The rule for a tensor, and the name of the parameter into which it is stacked.
struct RuleMatch {
  const Rule* rule = nullptr;
  std::string parameter;
};
std::optional<RuleMatch> find_rule(std::string_view name);

// The scales that vLLM's attention has since 0.14, even in unquantized models, and that its loader demands
// (vllm/attention/layer.py). They are float32 scalars of 1.
bool is_scale(std::string_view parameter);
std::vector<LocalTensor> scales_of(Index layer);

// The parameters of a request.
class VllmLayout {
 public:
  // A parameter of vLLM, and the tensors of the request that are stacked in it.
  struct Stack {
    std::string name;
    std::vector<std::size_t> tensors;  // in the order in which they are stacked
    Index stage = 0;                   // the stage that holds it
  };

  static Result<VllmLayout> make(LayoutRequest request);

  const LayoutRequest& request() const { return request_; }
  Index stages() const { return stages_; }
  Index ranks() const { return ranks_; }                                // of a stage
  const std::vector<Stack>& parameters() const { return parameters_; }  // in the order of the request

  // Returns the part of a parameter that a rank of its stage holds.
  Result<LocalTensor> local(const Stack& p, Index rank) const;

 private:
  explicit VllmLayout(LayoutRequest request)
      : request_(std::move(request)), stages_(request_.mesh.size("pp")), ranks_(request_.mesh.size("tp")) {}
  Status check() const;
  Status stack();
  Index stage_of(std::string_view parameter, Index layers) const;
  Status check_stack(const Stack& p) const;

  LayoutRequest request_;
  Index stages_, ranks_;
  std::vector<const Rule*> rules_;  // for each tensor of the request
  std::vector<Stack> parameters_;
};

}  // namespace reshard::vllm
