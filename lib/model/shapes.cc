// SPDX-License-Identifier: Apache-2.0
#include "lib/model/shapes.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "lib/base/text.h"
#include "lib/model/formula.h"
#include "lib/model/quantization.h"

namespace reshard {
namespace {

// A parameter, and how its dimensions correspond to those of its rule.
struct MatchedParameter {
  const Tensor* tensor = nullptr;
  const NameRule* rule = nullptr;
  bool is_transposed = false;  // the last two dimensions

  int dimension(int d) const {
    const int rank = tensor->shape.rank();
    return is_transposed && d >= rank - 2 ? 2 * rank - 3 - d : d;
  }
};

std::optional<MatchedParameter> see(const Family& family, const Tensor& tensor) {
  const StateKey key = split_state_key(tensor.key());
  if (key.kind != StateKind::kModel || !is_floating(tensor.dtype) || tensor.elements() == 0) return std::nullopt;
  const auto parsed = parse_name(family, key.parameter);
  if (!parsed || parsed->is_of_quantized() || parsed->rule->is_dropped()) return std::nullopt;
  const Form form = parsed->stored ? parsed->stored->form : Form::kSame;
  const bool is_transposed = form == Form::kTransposed && tensor.shape.rank() >= 2;
  if (!is_transposed && form != Form::kSame && form != Form::kRotaryQuery && form != Form::kRotaryKey)
    return std::nullopt;
  if (form == Form::kSame && transposed_in_memory(family, *parsed->rule)) return std::nullopt;
  return MatchedParameter{&tensor, parsed->rule, is_transposed};
}

class Sizes {
 public:
  // Learns sizes that are single dimensions of a tensor, or fails if one contradicts a known size.
  Status learn(const MatchedParameter& seen) {
    return each_dimension(seen, [&](const std::string& formula, int d, Index n) -> Status {
      if (!is_single_name(formula)) return {};
      const auto [known, is_new] = known_.emplace(formula, Known{n, seen.tensor});
      if (is_new || known->second.size == n) return {};
      return contradiction(seen, d, formula + " " + with_commas(known->second.size), {formula});
    });
  }

  // Checks dimensions that follow from known sizes.
  Status check(const MatchedParameter& seen) const {
    return each_dimension(seen, [&](const std::string& formula, int d, Index n) -> Status {
      if (is_single_name(formula)) return {};
      std::set<std::string> names;
      const NumberOf number_of = [&](std::string_view name) -> std::optional<Index> {
        names.emplace(name);
        const auto known = known_.find(name);
        return known == known_.end() ? std::nullopt : std::optional(known->second.size);
      };
      const auto expected = evaluate(formula, number_of);
      if (!expected || *expected == n) return {};
      return contradiction(seen, d, with_commas(*expected) + " (" + explain(formula, number_of) + ")", names);
    });
  }

 private:
  struct Known {
    Index size = 0;
    const Tensor* of = nullptr;  // the tensor that determined it
  };

  template <class Visit>
  static Status each_dimension(const MatchedParameter& seen, const Visit& visit) {
    const std::vector<std::string> formulas = split(seen.rule->shape, ',');
    if (std::ssize(formulas) != seen.tensor->shape.rank()) {
      const Dims& shape = seen.tensor->shape;
      if (shape.rank() != 1) return {};
      return corrupt(
          tensor_text(seen.tensor->name) + " " + to_string(shape) + ": expected " +
          count_of(std::ssize(formulas), "dimension") + " (" + seen.rule->shape + "), got one: a flattened " +
          "parameter, as FSDP stores it, complete or one rank's part; add its config.json with --config to tell which");
    }
    for (int d = 0; d < seen.tensor->shape.rank(); ++d) {
      const std::string& formula = formulas[d];
      const int there = seen.dimension(d);
      TRY(visit(formula.substr(formula.find_first_not_of(' ')), there, seen.tensor->shape[there]));
    }
    return {};
  }

  // `names` are the sizes that it contradicts.
  Error contradiction(const MatchedParameter& seen, int d, const std::string& expected,
                      const std::set<std::string>& names) const {
    std::string by;
    for (const std::string& name : names) {
      const Tensor& of = *known_.find(name)->second.of;
      by += (by.empty() ? ", by " : " and ") + tensor_text(of.name) + " " + to_string(of.shape);
    }
    return corrupt(tensor_text(seen.tensor->name) + " " + to_string(seen.tensor->shape) + ": expected " + expected +
                   " in dimension " + std::to_string(d) + by + ", got " + with_commas(seen.tensor->shape[d]));
  }

  std::map<std::string, Known, std::less<>> known_;
};

}  // namespace

std::string explain_flat(const Dims& got, const Dims& expected) {
  const Index all = volume(expected), here = volume(got);
  if (got.rank() != 1 || expected.rank() < 2 || here == 0 || here > all) return {};
  const std::string what = "a flattened parameter, as FSDP stores it: ";
  if (here == all) return what + "all of its " + count_of(all, "element");
  if (all % here == 0) return what + "1/" + with_commas(all / here) + " of its " + count_of(all, "element");
  return what + with_commas(here) + " of its " + count_of(all, "element");
}

Status check_shapes_agree(const Family& family, const std::vector<const Tensor*>& tensors) {
  std::vector<MatchedParameter> all;
  for (const Tensor* const tensor : tensors)
    if (const auto seen = see(family, *tensor)) all.push_back(*seen);
  // Tensors outside the layers come first: layers are many, and their matrices may be transposed.
  std::stable_partition(all.begin(), all.end(),
                        [](const MatchedParameter& s) { return s.rule->place != NameRule::Place::kLayer; });
  Sizes sizes;
  for (const MatchedParameter& seen : all) TRY(sizes.learn(seen));
  for (const MatchedParameter& seen : all) TRY(sizes.check(seen));
  return {};
}

Status check_shapes_agree(const Family& family, const Catalog& catalog) {
  std::vector<const Tensor*> tensors;
  const PackedWeights packed = find_packed(catalog, nullptr);
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i)
    if (!packed.is_of(i)) tensors.push_back(&catalog.tensors()[i]);
  return check_shapes_agree(family, tensors);
}

}  // namespace reshard
