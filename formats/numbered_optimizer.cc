// SPDX-License-Identifier: Apache-2.0
#include "formats/numbered_optimizer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/json.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/model/config.h"
#include "lib/model/parameter_order.h"

namespace reshard {
namespace {

constexpr std::string_view kState = "optimizer.state.";
constexpr std::string_view kGroupPrefix = "optimizer.param_groups.";
constexpr std::string_view kParameters = ".params";

using Names = std::vector<std::string>;
using Groups = std::vector<std::vector<Index>>;  // the numbers in each group

// Splits "optimizer.state.NUMBER.SUFFIX" into the number and ".SUFFIX".
std::optional<std::pair<Index, std::string>> number_of(std::string_view name) {
  if (!take(name, kState)) return std::nullopt;
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos || !is_digits(name.substr(0, dot))) return std::nullopt;
  const auto number = parse_number(name.substr(0, dot));
  if (!number) return std::nullopt;
  return std::pair(*number, std::string(name.substr(dot)));
}

// Returns the group whose parameters an object lists.
std::optional<Index> group_of(std::string_view name) {
  if (!take(name, kGroupPrefix) || !name.ends_with(kParameters)) return std::nullopt;
  name.remove_suffix(kParameters.size());
  return is_digits(name) ? parse_number(name) : std::nullopt;
}

// Returns the numbers in each group, in order; nothing if a list is not what torch writes or is missing.
std::optional<Groups> groups_of(Reader& optimizer) {
  std::map<Index, std::vector<Index>> by_number;
  for (const Blob& blob : optimizer.catalog().blobs) {
    const auto group = group_of(blob.name);
    if (!group) continue;
    const auto item = optimizer.blob_bytes(blob);
    const auto document = item ? torch_archive::read_object_item(*item) : Result<pickle::Document>(Error(item.error()));
    if (!document || !document->root().is_sequence()) return std::nullopt;
    const pickle::Value list = document->root();
    std::vector<Index>& numbers = by_number[*group];
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto number = list[i].as_int();
      if (!number) return std::nullopt;
      numbers.push_back(*number);
    }
  }
  Groups out;
  for (auto& [group, numbers] : by_number) {
    if (group != std::ssize(out)) return std::nullopt;
    out.push_back(std::move(numbers));
  }
  return out;
}

// Returns the shapes of the tensors that may be parameters.
std::map<std::string, Dims> shapes_of(const Catalog& model) {
  std::map<std::string, Dims> out;
  for (const Tensor& t : model.tensors())
    if (split_state_key(t.name).kind == StateKind::kModel && is_floating(t.dtype)) out.emplace(t.name, t.shape);
  return out;
}

// Returns the order of the parameters in the model's torch.save files. Nothing if tensors share their bytes, because
// only one of their names is the parameter's.
std::optional<Names> stored_order(const Catalog& model, const std::map<std::string, Dims>& shapes) {
  std::map<std::tuple<std::uint32_t, Index>, std::string> by_place;
  for (const Tensor& t : model.tensors()) {
    if (!shapes.contains(t.name)) continue;
    if (t.fragments.size() != 1) return std::nullopt;
    const Extent extent = t.fragments.extent(0);
    if (!by_place.emplace(std::tuple(extent.file, extent.offset), t.name).second) return std::nullopt;
  }
  Names out;
  for (auto& [place, name] : by_place) out.push_back(std::move(name));
  return out;
}

// Returns an order without the names of tensors whose bytes an earlier name has: torch.save stores a tied head under
// its own name too, but it is one parameter.
Names without_aliases(const Names& order, const Catalog& model) {
  std::set<std::tuple<std::uint32_t, Index>> seen;
  Names out;
  for (const std::string& name : order) {
    const auto found = model.find(name);
    const Tensor* const t = found ? &model.tensors()[*found] : nullptr;
    const bool is_one_piece = t && t->fragments.size() == 1 && t->elements() > 0;
    if (is_one_piece && !seen.emplace(t->fragments.extent(0).file, t->fragments.extent(0).offset).second) continue;
    out.push_back(name);
  }
  return out;
}

// Returns the table's order for the model type in the config.
std::optional<Names> known_order(const ConfigFile& file, const std::map<std::string, Dims>& shapes) {
  const auto config = parse_json(file.text, file.path);
  const Json* const type = config ? config->find("model_type") : nullptr;
  if (!type || !type->is_string()) return std::nullopt;
  Names names;
  for (const auto& [name, shape] : shapes) names.push_back(name);
  return in_parameter_order(*type->as_string(), names);
}

// Returns whether a recipe gives the parameter weight decay: if it has two dimensions, or is neither a bias nor a norm.
using Decays = bool (*)(const std::string& name, const Dims& shape);
constexpr Decays kDecays[] = {
    [](const std::string&, const Dims& shape) { return shape.rank() >= 2; },
    [](const std::string& name, const Dims&) {
      std::string low = name;
      std::transform(low.begin(), low.end(), low.begin(),
                     [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
      return low.find("bias") == std::string::npos && low.find("norm") == std::string::npos &&
             low.find("ln_") == std::string::npos;
    },
};

// Divides the names of an order among groups of these sizes: one group with all, or two with and without weight decay.
std::set<Names> divided(const Names& order, const std::map<std::string, Dims>& shapes, const Groups& groups) {
  if (groups.size() == 1) return {order};
  std::set<Names> out;
  for (const Decays decays : kDecays) {
    Names first, second;
    for (const std::string& name : order) (decays(name, shapes.at(name)) ? first : second).push_back(name);
    for (int turn = 0; turn < 2; ++turn, first.swap(second)) {
      if (first.size() != groups[0].size()) continue;
      Names all = first;
      all.insert(all.end(), second.begin(), second.end());
      out.insert(std::move(all));
    }
  }
  return out;
}

// Returns why the groups do not number this many parameters: a clause, or nothing.
std::string fault_of(const Groups& groups, std::size_t parameters) {
  std::size_t count = 0;
  std::set<Index> numbers;
  for (const auto& group : groups) {
    count += group.size();
    numbers.insert(group.begin(), group.end());
  }
  if (count != parameters)
    return "the optimizer numbers " + count_of(count, "parameter") + ", and the model has " +
           with_commas(static_cast<Index>(parameters));
  const bool are_all = numbers.size() == count &&
                       (count == 0 || (*numbers.begin() == 0 && *numbers.rbegin() == static_cast<Index>(count) - 1));
  return are_all ? "" : "its groups do not list each number once";
}

// Returns the number of a state that no group lists, if there is one.
std::optional<Index> unlisted_state(const Catalog& optimizer, const std::map<Index, std::string>& names) {
  const auto is_unlisted = [&](const auto& named) {
    const auto number = number_of(named.name);
    return number && !names.contains(number->first);
  };
  const auto& tensors = optimizer.tensors();
  if (const auto t = std::find_if(tensors.begin(), tensors.end(), is_unlisted); t != tensors.end())
    return number_of(t->name)->first;
  const auto b = std::find_if(optimizer.blobs.begin(), optimizer.blobs.end(), is_unlisted);
  return b == optimizer.blobs.end() ? std::nullopt : std::optional(number_of(b->name)->first);
}

// Returns whether the moments of each number have the shape of the parameter that it would be.
bool fits(const std::map<Index, Dims>& moments, const std::map<Index, std::string>& names,
          const std::map<std::string, Dims>& shapes) {
  return std::all_of(moments.begin(), moments.end(), [&](const auto& moment) {
    const auto name = names.find(moment.first);
    return name != names.end() && shapes.at(name->second) == moment.second;
  });
}

// Reads the optimizer under other names. `names` has each number in `groups` and in the optimizer's names.
class RenamedOptimizer : public Reader {
 public:
  RenamedOptimizer(std::unique_ptr<Reader> inner, const std::map<Index, std::string>& names, const Groups& groups)
      : inner_(std::move(inner)) {
    const Catalog& from = inner_->catalog();
    catalog_ = from;
    catalog_.share_tensors(Catalog());
    catalog_.blobs.clear();
    for (Tensor t : from.tensors()) {
      rename(t, names);
      (void)catalog_.add(std::move(t));  // names are unique, like the numbers
    }
    std::size_t number = 0;
    for (const Blob& blob : from.blobs) {
      Blob renamed = blob;
      rename(renamed, names);
      origins_.emplace(renamed.name, number++);
      if (const auto group = group_of(blob.name)) {
        Names& list = lists_[blob.name];
        for (const Index parameter : groups.at(*group)) list.push_back(names.at(parameter));
      }
      catalog_.blobs.push_back(std::move(renamed));
    }
    catalog_.sort_by_name();
  }

  Status locate(const std::vector<std::size_t>&, int, const std::string&) override { return {}; }

  Result<std::string> blob_bytes(const Blob& blob) override {
    const auto list = lists_.find(blob.name);
    if (list == lists_.end()) return inner_->blob_bytes(origin_of(blob));
    pickle::PickleWriter w;
    w.empty_list();
    w.mark();
    for (const std::string& name : list->second) w.text(name);
    w.append_items();
    return torch_archive::object_item(std::move(w).finish());
  }

  std::string describe(const Blob& blob) override {
    const auto list = lists_.find(blob.name);
    if (list == lists_.end()) return inner_->describe(origin_of(blob));
    return "[" + some_of(list->second) + "]";
  }

 private:
  template <class Named>
  static void rename(Named& named, const std::map<Index, std::string>& names) {
    const auto number = number_of(named.name);
    if (!number) return;
    const std::string& parameter = names.at(number->first);
    named.name = std::string(kState) + parameter + number->second;
    named.path = {"optimizer", "state", parameter, number->second.substr(1)};
  }

  const Blob& origin_of(const Blob& blob) const { return inner_->catalog().blobs[origins_.at(blob.name)]; }

  std::unique_ptr<Reader> inner_;
  std::unordered_map<std::string, std::size_t> origins_;  // of each object, its place in the inner catalog
  std::map<std::string, Names> lists_;                    // of parameters, by the object's name
};

}  // namespace

NamedOptimizer with_parameter_names(std::unique_ptr<Reader> optimizer, Reader& model, const std::string& config,
                                    bool is_ordered) {
  const auto no = [](std::string why) { return NamedOptimizer{nullptr, std::move(why)}; };
  const auto groups = groups_of(*optimizer);
  if (!groups || groups->empty() || groups->size() > 2)
    return no("expected one parameter group, or two (with and without weight decay)");
  std::map<Index, Dims> moments;
  for (const Tensor& t : optimizer->catalog().tensors())
    if (const auto number = number_of(t.name); number && number->second != kStepSuffix)
      if (!moments.emplace(number->first, t.shape).second && moments.at(number->first) != t.shape)
        return no("a parameter has states of several shapes");
  const std::map<std::string, Dims> shapes = shapes_of(model.catalog());
  const auto file = find_config_file(model, config, {});
  auto order = file && file->is_there() ? known_order(*file, shapes) : std::nullopt;
  if (!order && is_ordered) order = stored_order(model.catalog(), shapes);
  if (!order)
    return no(std::string("the order of the model's parameters is unknown") +
              (file && !file->is_there() ? " without a config.json next to it" : ""));
  order = without_aliases(*order, model.catalog());
  if (std::string why = fault_of(*groups, order->size()); !why.empty()) return no(std::move(why));
  std::vector<std::map<Index, std::string>> found;
  for (const Names& all : divided(*order, shapes, *groups)) {
    std::map<Index, std::string> names;
    std::size_t next = 0;
    for (const auto& group : *groups)
      for (const Index number : group) names.emplace(number, all.at(next++));
    if (fits(moments, names, shapes)) found.push_back(std::move(names));
  }
  if (found.empty()) return no("their shapes are not those of the model's parameters in their order");
  if (found.size() > 1) return no("two ways to put the parameters into groups fit");
  if (moments.size() < found.front().size()) return no("parameters have no state to compare them with");
  if (const auto number = unlisted_state(optimizer->catalog(), found.front()))
    return no("no group lists parameter " + std::to_string(*number) + ", which has a state");
  return {std::make_unique<RenamedOptimizer>(std::move(optimizer), found.front(), *groups), ""};
}

}  // namespace reshard
