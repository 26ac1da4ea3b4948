// SPDX-License-Identifier: Apache-2.0
// Megatron's command-line arguments, which every checkpoint contains as the argparse.Namespace `args`
// (megatron/training/arguments.py). Converts them to the config.json of the model that they describe, and back.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_writer.h"
#include "lib/base/json.h"
#include "lib/checkpoint/catalog.h"

namespace reshard::megatron {

// The arguments of one checkpoint.
class Arguments {
 public:
  // Reads the members that are booleans, numbers and strings. Returns no arguments if the value has no members.
  static Arguments read(pickle::Value value);

  bool empty() const { return values_.empty(); }
  std::optional<Index> number(std::string_view name) const;  // nothing unless it is a whole number above 0
  std::optional<double> real(std::string_view name) const;   // may be a whole number
  bool flag(std::string_view name) const;                    // false if it is missing
  std::string text(std::string_view name) const;             // empty if it is missing

  using Member = std::variant<bool, Index, double, std::string>;
  void set(std::string name, Member value) { values_.insert_or_assign(std::move(name), std::move(value)); }
  void write(pickle::PickleWriter& w) const;  // writes an argparse.Namespace

 private:
  void write_members(pickle::PickleWriter& w) const;

  std::map<std::string, Member, std::less<>> values_;
};

// The counters in args that a resumed run needs, besides the iteration.
inline constexpr std::array<std::string_view, 3> kSampleCounts = {"consumed_train_samples", "consumed_valid_samples",
                                                                  "skipped_train_samples"};
// Returns these counters by name, as far as the args in `state` have them. They refer to the document of `state`.
std::vector<std::pair<std::string, pickle::Value>> sample_counts(pickle::Value state);

// The degrees of parallelism, 1 if not given.
struct Degrees {
  Index tp = 1, pp = 1, ep = 1;
  Index etp = 1;  // tensor parallelism of the experts
  Index vpp = 1;  // chunks of the model on each stage
  Index dp = 1;
  friend bool operator==(const Degrees&, const Degrees&) = default;
};
Result<Degrees> degrees_of(const Arguments& args);
std::string mesh_text(const Degrees& degrees);  // "pp=2, dp=4, tp=2, ep=2 (experts' tp=1)"

// Returns the size of the vocabulary, for Catalog::vocabulary, or 0 if args do not give it or no embedding has that
// many rows.
Index vocabulary_of(const Arguments& args, const Catalog& catalog);
std::string vocabulary_text(const Arguments& args, const Catalog& catalog);  // "; 257 tokens, padded to 288 rows"

// A config.json made from args and the names of the catalog's tensors, or the reason why there is none. It is of a
// LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM or Qwen3MoeForCausalLM.
struct MadeConfig {
  std::optional<Json> config;
  std::string why_not;
};
MadeConfig make_config(const Arguments& args, const Catalog& catalog);

// Returns the arguments for the model of a config.json: one of those above, or a MistralForCausalLM. Fails with
// kUnsupported if args cannot express it.
Result<Arguments> arguments_of(const Json& json);

}  // namespace reshard::megatron
