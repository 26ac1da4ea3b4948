// Whether a model can be trained on a mesh, told from its config.json alone: what the degrees of parallelism have to
// divide, what ranks would be left with nothing, and whether the degrees multiply to the ranks there are.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/forecast/rank_memory.h"
#include "lib/model/parameters.h"

namespace reshard {

// "pp=16,cp=16,dp=8,tp=8": Mesh::parse's axes and dp, which is another word for dp_shard. ep is taken out of the mesh.
Result<Degrees> parse_degrees(std::string_view text);
std::string to_string(const Degrees& degrees);  // "pp=16, dp_shard=8, tp=8, ep=4"; "one rank"

struct FeasibilityRequest {
  Degrees degrees;
  std::optional<Index> world;     // ranks there are, at least 1
  std::optional<Index> sequence;  // tokens of a sequence, at least 1
  MemoryOptions memory;
};

// A vocabulary as a framework would pad it for this tensor parallelism.
struct VocabularyPadding {
  std::string_view framework;  // "Megatron-LM"
  Index multiple = 1;          // make_vocab_size_divisible_by
  Index rows = 0;
};

struct Feasibility {
  std::vector<Finding> findings;
  std::vector<CheckRun> checks;
  std::vector<Parameter> parameters;  // the model's table
  Index elements = 0;                 // of them, tied ones counted once
  std::vector<VocabularyPadding> paddings;
  std::vector<StageMemory> stages;  // empty where the mesh cannot hold the model at all
};

// Fails where the config lacks what the table needs.
Result<Feasibility> check_feasibility(const Family& family, const ModelConfig& config,
                                      const FeasibilityRequest& request);

}  // namespace reshard
