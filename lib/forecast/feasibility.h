// SPDX-License-Identifier: Apache-2.0
// Checks from a config.json alone whether a model can be trained on a mesh: what the degrees of parallelism must
// divide, which ranks would be empty, and whether the degrees multiply to the number of ranks.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/forecast/rank_memory.h"
#include "lib/model/parameters.h"

namespace reshard {

// Parses "pp=16,cp=16,dp=8,tp=8": the axes of Mesh::parse(), and dp as another word for dp_shard. ep is not part of the
// mesh.
Result<Degrees> parse_degrees(std::string_view text);
std::string to_string(const Degrees& degrees);  // "pp=16, dp_shard=8, tp=8, ep=4"; "one rank"

struct FeasibilityRequest {
  Degrees degrees;
  std::optional<Index> world;     // number of ranks, at least 1
  std::optional<Index> sequence;  // tokens per sequence, at least 1
  MemoryOptions memory;
};

// The vocabulary size with the padding of a framework for this tensor parallelism.
struct VocabularyPadding {
  std::string_view framework;  // "Megatron-LM"
  Index multiple = 1;          // make_vocab_size_divisible_by
  Index rows = 0;
};

struct Feasibility {
  std::vector<Finding> findings;
  std::vector<CheckRun> checks;
  std::vector<Parameter> parameters;  // the model's table
  Index elements = 0;                 // tied ones counted once
  std::vector<VocabularyPadding> paddings;
  std::vector<StageMemory> stages;  // empty if the mesh cannot hold the model at all
};

// Fails if the config lacks numbers that the family's table needs.
Result<Feasibility> check_feasibility(const Family& family, const ModelConfig& config,
                                      const FeasibilityRequest& request);

}  // namespace reshard
