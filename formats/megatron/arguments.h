// What Megatron's command line said when a checkpoint was saved: the argparse.Namespace `args` in each of them
// (megatron/training/arguments.py), the config.json of the model that it describes, and the other way round.
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

class Arguments {
 public:
  // The members that are booleans, numbers and strings; none where the value is nothing that has members.
  static Arguments read(pickle::Value value);

  bool empty() const { return values_.empty(); }
  std::optional<Index> number(std::string_view name) const;  // where it is a whole number above 0
  std::optional<double> real(std::string_view name) const;   // a whole number too
  bool flag(std::string_view name) const;                    // false where it is absent
  std::string text(std::string_view name) const;             // empty where it is absent

  using Member = std::variant<bool, Index, double, std::string>;
  void set(std::string name, Member value) { values_.insert_or_assign(std::move(name), std::move(value)); }
  void write(pickle::PickleWriter& w) const;  // an argparse.Namespace

 private:
  void write_members(pickle::PickleWriter& w) const;

  std::map<std::string, Member, std::less<>> values_;
};

// What args count that a run goes on from, beside the iteration.
inline constexpr std::array<std::string_view, 3> kSampleCounts = {"consumed_train_samples", "consumed_valid_samples",
                                                                  "skipped_train_samples"};
// Those of them that `state` has in its args, by name. Refers to its document.
std::vector<std::pair<std::string, pickle::Value>> sample_counts(pickle::Value state);

// How many ranks share a model, along each axis; 1 where nothing is said.
struct Degrees {
  Index tp = 1, pp = 1, ep = 1;
  Index etp = 1;  // of the experts' tensor parallelism
  Index vpp = 1;  // chunks of the model on each stage
  Index dp = 1;
  friend bool operator==(const Degrees&, const Degrees&) = default;
};
Result<Degrees> degrees_of(const Arguments& args);
std::string mesh_text(const Degrees& degrees);  // "pp=2, dp=4, tp=2, ep=2 (experts' tp=1)"

// Words of the vocabulary, for Catalog::vocabulary; 0 where args do not say, or no embedding has as many rows.
Index vocabulary_of(const Arguments& args, const Catalog& catalog);
std::string vocabulary_text(const Arguments& args, const Catalog& catalog);  // "; 257 words, padded to 288 rows"

// The config.json of a LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM or
// Qwen3MoeForCausalLM, by args and the names of the catalog's tensors; or a phrase that says why there is none.
struct MadeConfig {
  std::optional<Json> config;
  std::string why_not;
};
MadeConfig make_config(const Arguments& args, const Catalog& catalog);

// What args say of the model that a config.json describes: one of those, or a MistralForCausalLM. Unsupported where
// they have no words for it.
Result<Arguments> arguments_of(const Json& json);

}  // namespace reshard::megatron
