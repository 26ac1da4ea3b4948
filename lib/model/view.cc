// SPDX-License-Identifier: Apache-2.0
// Implements view.h.
#include "lib/model/view.h"

#include <algorithm>
#include <map>
#include <set>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/layout/flat_boxes.h"
#include "lib/model/layer_axis.h"
#include "lib/model/packing.h"
#include "lib/model/parameters.h"
#include "lib/model/quantization.h"
#include "lib/model/shapes.h"

namespace reshard {
namespace {

Tensor renamed(const Tensor& from, std::string name) {
  Tensor out = from;
  out.name = std::move(name);
  out.plain_key.clear();
  return out;
}

// ---- The view, tensor by tensor

class ViewBuilder {
 public:
  ViewBuilder(const Catalog& from, const ViewOptions& options, std::vector<std::string>* dropped,
              std::vector<std::string>* reshaped)
      : from_(from),
        options_(options),
        dropped_(dropped),
        reshaped_(reshaped),
        packed_(find_packed(from, options.config)) {}

  Result<Catalog> build() {
    out_ = from_.without_tensors();
    TRY(out_.reserve(from_.tensors().size()));
    for (std::size_t i = 0; i < from_.tensors().size(); ++i) TRY(add(i));
    if (!unknown_.empty()) return unknown_error();
    if (!twice_.empty()) return twice_error();
    TRY(check_sections());
    TRY(divide_columns(out_, *options_.family, options_.other));
    add_tied_head();
    out_.sort_by_name();
    return std::move(out_);
  }

 private:
  Status add(std::size_t i) {
    const Tensor& tensor = from_.tensors()[i];
    if (const PackedWeight* const weight = packed_.of(i); weight && !is_known_to_families(weight->packing))
      return put(renamed(tensor, tensor.key()));
    const StateKey key = split_state_key(tensor.key());
    const auto parsed =
        key.parameter.empty()
            ? std::nullopt
            : as_named(TRY(parse_tensor(*options_.family, key.parameter, tensor.shape, options_.config, what(tensor))));
    if (!parsed) {
      if (tensor.is_buffer && dropped_ && !options_.keep_unknown) {
        dropped_->push_back(tensor.name);
        return {};
      }
      const bool is_own_head = options_.config && has_other_head(*options_.config) && is_other_head(key.parameter);
      const bool is_known = options_.keep_unknown || is_own_head || options_.family->carries(key.parameter);
      if (key.kind == StateKind::kModel && !is_known) unknown_.push_back(tensor.name);
      return put(renamed(tensor, canonical_key(*options_.family, tensor.key())));
    }
    if (parsed->rule->is_dropped() || is_unused_head(*parsed)) {
      if (dropped_) dropped_->push_back(tensor.name);
      return {};
    }
    if (parsed->is_packed()) return add_parts(tensor, key, *parsed);
    const bool is_paired = parsed->stored && is_rotary(parsed->stored->form) && tensor.shape.rank() > 0;
    if (is_paired && options_.hf_rows) return add_parts(tensor, key, *parsed);
    Tensor as = renamed(tensor, key.prefix + canonical_name(*parsed) + key.suffix);
    TRY(unflatten(as, *parsed));
    return put(std::move(as));
  }

  // Returns whether it is a head that is tied to the embedding, in a convention whose models do not use it then.
  bool is_unused_head(const ParsedName& parsed) const {
    return info(parsed.convention).keeps_tied_head && !parsed.rule->tied_to.empty() && options_.config &&
           options_.config->tie_word_embeddings();
  }

  // Returns the name as parsed in the view's convention, if that convention has this name too.
  std::optional<ParsedName> as_named(std::optional<ParsedName> parsed) const {
    if (!parsed || !parsed->stored || parsed->convention == options_.convention) return parsed;
    for (const ConventionTable& table : options_.family->conventions)
      for (const StoredRule& rule : table.rules)
        if (table.convention == options_.convention && rule.stored == parsed->stored->stored) {
          parsed->stored = &rule;
          parsed->convention = table.convention;
          return parsed;
        }
    return parsed;
  }

  // Restores the shape of a parameter that is stored in one dimension with all of its elements, as by FSDP.
  Status unflatten(Tensor& tensor, const ParsedName& parsed) {
    if (tensor.shape.rank() != 1 || !options_.config || parsed.is_of_quantized()) return {};
    const auto shape = expected_shape(*parsed.rule, *options_.config, parsed.layer);
    if (!shape || shape->rank() < 2 || volume(*shape) != tensor.shape[0]) return {};
    for (FragmentList* list : {&tensor.fragments, &tensor.replicas})
      *list = unflattened(*list, *shape, byte_size(tensor.dtype));
    tensor.shape = *shape;
    if (reshaped_) reshaped_->push_back(tensor.name);
    return {};
  }
  static FragmentList unflattened(const FragmentList& flat, const Dims& shape, Index element_bytes) {
    FragmentList out(shape.rank());
    const Dims strides = row_major_strides(shape);
    for (std::size_t i = 0; i < flat.size(); ++i) {
      const Fragment from = flat.get(i);
      if (from.box.empty()) continue;
      for (const Box& box : boxes_of_run(shape, from.box.begin(0), from.box.end(0))) {
        Fragment part = from;
        Index first = -from.box.begin(0);
        part.strides = strides;
        for (int d = 0; d < shape.rank(); ++d) {
          first += box.origin[d] * strides[d];
          part.strides[d] *= from.strides[0];
        }
        part.box = box;
        part.start += first * from.strides[0] * element_bytes;
        out.add(part);
      }
    }
    return out;
  }

  // Adds a tensor. Names that occur twice are collected and reported together.
  Status put(Tensor tensor) {
    if (!out_.find(tensor.name)) return out_.add(std::move(tensor));
    twice_.push_back(std::move(tensor));
    return {};
  }

  Status add_parts(const Tensor& tensor, const StateKey& key, const ParsedName& parsed) {
    const bool is_section = parsed.stored->is_section();
    if (tensor.shape.rank() == 0) {  // an optimizer's step applies to all parts; stored, it belongs to the first
      const bool has_experts = parsed.stored->has_experts();
      std::vector<std::string> names = part_names(parsed, has_experts ? TRY(experts_of(tensor, key)) : 0);
      if (options_.as_stored) names.resize(1);
      for (const std::string& name : names)
        if (std::string canonical = key.prefix + name + key.suffix; !is_section || !out_.find(canonical))
          TRY(put(renamed(tensor, std::move(canonical))));
      return {};
    }
    const auto parts = TRY(parts_of(parsed, tensor.shape, options_.config, options_.hf_rows, what(tensor)));
    const PackedParts joined(tensor, parts);
    for (const PackedPart& part : parts) {
      TRY(is_section ? put_section(joined.unpack(part, key.prefix + part.name + key.suffix), parsed)
                     : put(joined.unpack(part, key.prefix + part.name + key.suffix)));
    }
    return {};
  }

  // Adds the section's boxes to those of the sections seen before.
  Status put_section(Tensor section, const ParsedName& parsed) {
    Sections& known = sections_[section.name];
    known.of = parsed;
    if (const auto part = parse_name(*options_.family, split_state_key(section.name).parameter))
      known.of.layer = part->layer;  // of a stack of layers
    if (!known.found.insert(parsed.stored->section).second) {
      twice_.push_back(std::move(section));
      return {};
    }
    const auto there = out_.find(section.name);
    if (!there) return put(std::move(section));
    Tensor& whole = out_.tensor(*there);
    if (whole.shape != section.shape || whole.dtype != section.dtype)
      return corrupt(tensor_text(section.name) + ": its parts are " + std::string(info(whole.dtype).torch_name) + " " +
                     to_string(whole.shape) + " and " + std::string(info(section.dtype).torch_name) + " " +
                     to_string(section.shape));
    for (const auto& [to, from] :
         {std::pair(&whole.fragments, &section.fragments), std::pair(&whole.replicas, &section.replicas)})
      for (std::size_t i = 0; i < from->size(); ++i) to->add(from->get(i));
    return {};
  }

  Status check_sections() const {
    for (const auto& [name, sections] : sections_) {
      const ParsedName& of = sections.of;
      for (const StoredRule* stored : stored_sections(*options_.family, *of.rule, of.convention, of.layer))
        if (!sections.found.contains(stored->section))
          return corrupt(from_.where() + ": " + tensor_text(name) + " is stored in parts, and part '" +
                         stored_name(*options_.family, *stored, of.layer, of.expert) + "' is missing");
    }
    return {};
  }

  // Returns the number of experts of the parameter that an optimizer's scalar belongs to.
  Result<Index> experts_of(const Tensor& tensor, const StateKey& key) const {
    const auto parameter = from_.find_parameter(key.parameter);
    if (parameter && from_.tensors()[*parameter].shape.rank() > 0) return from_.tensors()[*parameter].shape[0];
    if (const Index n = options_.config ? options_.config->number("num_experts") : 0; n > 0) return n;
    return usage_error(what(tensor) +
                       ": applies to the experts of a tensor that is missing, and no config.json gives " +
                       "their number; add one with --config");
  }

  static std::string what(const Tensor& tensor) { return tensor_text(tensor.name); }

  // A tied model stores the embedding once, so the head is a second tensor over the same bytes.
  void add_tied_head() {
    if (options_.as_stored || !options_.config || !options_.config->tie_word_embeddings()) return;
    for (const NameRule& rule : options_.family->rules) {
      if (rule.tied_to.empty() || out_.find(rule.hf)) continue;
      if (const auto embedding = out_.find(rule.tied_to)) (void)out_.add(renamed(out_.tensors()[*embedding], rule.hf));
    }
  }

  Error unknown_error() const {
    std::string list;
    for (std::size_t i = 0; i < std::min<std::size_t>(unknown_.size(), 20); ++i)
      list += "\n  " + printable(unknown_[i]);
    if (unknown_.size() > 20) list += "\n  and " + std::to_string(unknown_.size() - 20) + " more";
    const std::string what = from_.where() + ": " + count_of(std::ssize(unknown_), "tensor") +
                             (unknown_.size() == 1 ? " has a name" : " have names") + " that family " +
                             std::string(options_.family->name) + " does not know";
    if (const auto adapters = std::count_if(unknown_.begin(), unknown_.end(), is_adapter))
      return unsupported(from_.where() + ": " + count_of(adapters, "tensor") +
                         " of adapters next to the weights that " +
                         "they change, which reshard cannot merge under these names. Without them the output is the " +
                         "model before its fine-tuning: merge them with the library that trained them, or add " +
                         "--exclude to leave them out:" + list);
    const std::vector<std::string> missing = compare_names(*options_.family, from_, options_.config).missing;
    if (missing.empty())
      return unsupported(what + "; add --keep-unknown to copy them unchanged, or --exclude to leave them out:" + list);
    // Whether they are copied or left out, the model would lack the missing parameters.
    return unsupported(what + ", and no tensor has the name of " + some_of(missing) + ", which the model needs; if " +
                       "they are the same, add --rename FROM=TO; otherwise add --family none to write everything " +
                       "under its own names:" + list);
  }

  Error twice_error() const {
    constexpr std::size_t kShown = 4;
    std::string list;
    for (std::size_t i = 0; i < std::min(twice_.size(), kShown); ++i)
      list += "\n  " + printable(twice_[i].name) + " of " + file_of(out_.tensors()[*out_.find(twice_[i].name)]) +
              " and of " + file_of(twice_[i]);
    if (twice_.size() > kShown) list += "\n  and " + with_commas(std::ssize(twice_) - Index{kShown}) + " more";
    return corrupt(from_.where() + ": " + count_of(std::ssize(twice_), "tensor") +
                   (twice_.size() == 1 ? " is" : " are") +
                   " stored twice, under two names; add --exclude to leave one of them out:" + list);
  }
  std::string file_of(const Tensor& t) const {
    return t.fragments.empty() ? "no file" : printable(from_.files[t.fragments.extent(0).file].path);
  }

  const Catalog& from_;
  const ViewOptions& options_;
  std::vector<std::string>* dropped_;
  std::vector<std::string>* reshaped_;
  const PackedWeights packed_;
  Catalog out_;
  struct Sections {
    ParsedName of;  // any of them
    std::set<std::size_t> found;
  };
  std::map<std::string, Sections> sections_;  // by canonical name
  std::vector<std::string> unknown_;
  std::vector<Tensor> twice_;  // under canonical names that were taken
};

}  // namespace

namespace {

// Returns the fragments with the last dimension divided into [n / columns, columns]: one for each, and one more for
// each end that is inside a row of columns.
FragmentList divided(const FragmentList& list, int rank, Index columns, Index element_bytes) {
  FragmentList out(rank + 1);
  const int last = rank - 1;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Fragment f = list.get(i);
    const Index begin = f.box.begin(last), end = f.box.end(last), stride = f.strides[last];
    for (Index at = begin; at < end;) {
      const Index column = at % columns, left = end - at;
      const bool is_whole = column == 0 && left >= columns;
      const Index taken = is_whole ? left / columns * columns : std::min(left, columns - column);
      Fragment part = f;
      part.box.origin[last] = at / columns;
      part.box.shape[last] = is_whole ? taken / columns : 1;
      part.strides[last] = stride * columns;
      part.box.origin.push_back(column);
      part.box.shape.push_back(is_whole ? columns : taken);
      part.strides.push_back(stride);
      part.start += (at - begin) * stride * element_bytes;
      out.add(part);
      at += taken;
    }
  }
  return out;
}

}  // namespace

Status divide_columns(Catalog& catalog, const Family& family, Convention convention) {
  const auto table = std::find_if(family.conventions.begin(), family.conventions.end(),
                                  [&](const ConventionTable& t) { return t.convention == convention; });
  if (table == family.conventions.end() ||
      std::none_of(table->rules.begin(), table->rules.end(), [](const StoredRule& rule) { return rule.columns > 1; }))
    return {};
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    const Tensor& t = catalog.tensors()[i];
    const auto parsed = parse_name(family, split_state_key(t.key()).parameter);
    if (!parsed || parsed->is_of_quantized() || t.columns > 1 || t.shape.rank() == 0) continue;
    const StoredRule* const stored = stored_rule(family, *parsed->rule, convention, parsed->layer);
    if (!stored || stored->columns == 1) continue;
    const Index n = t.shape[t.shape.rank() - 1];
    if (n % stored->columns != 0 || t.shape.rank() == kMaxRank)
      return corrupt(catalog.where() + ": " + tensor_text(t.name) + " " + to_string(t.shape) +
                     ": expected a last dimension of " + count_of(stored->columns, "column") + " in turn");
    Tensor& made = catalog.tensor(i);
    for (FragmentList* list : {&made.fragments, &made.replicas})
      *list = divided(*list, made.shape.rank(), stored->columns, byte_size(made.dtype));
    made.shape[made.shape.rank() - 1] = n / stored->columns;
    made.shape.push_back(stored->columns);
    made.columns = stored->columns;
  }
  return {};
}

bool same_values(const Family& family, Convention a, Convention b) {
  const auto change = [&](const NameRule& rule, Convention convention) {
    const StoredRule* const stored = stored_rule(family, rule, convention);
    return stored ? stored->change : ValueChange();
  };
  return std::all_of(family.rules.begin(), family.rules.end(),
                     [&](const NameRule& rule) { return change(rule, a) == change(rule, b); });
}

Result<Catalog> canonical_view(const Catalog& catalog, const ViewOptions& options, std::vector<std::string>* dropped,
                               std::vector<std::string>* reshaped) {
  return ViewBuilder(catalog, options, dropped, reshaped).build();
}

Result<Catalog> plain_view(Catalog catalog) {
  const auto& tensors = catalog.tensors();
  if (std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.plain_key.empty(); })) return catalog;
  Catalog out = catalog.without_tensors();
  TRY(out.reserve(tensors.size()));
  for (const Tensor& t : tensors) TRY(out.add(renamed(t, t.key())));
  out.sort_by_name();
  return out;
}

Result<const Family*> recorded_family(const Json& manifest, Families families) {
  const Json* const name = manifest.find("family");
  if (!name || name->is_null()) return nullptr;
  if (const Family* const family = find_family(TRY(name->as_string()), families)) return family;
  return unsupported("unknown family '" + printable(TRY(name->as_string())) +
                     "'; if it is your own, add --family-file");
}

Result<Catalog> recorded_view(const Json& manifest, const Catalog& catalog, const ModelConfig* config,
                              Families families) {
  const Family* const family = TRY(recorded_family(manifest, families));
  if (!family) return catalog;
  const Json* const options = manifest.find("options");
  const auto title = options ? options->get_string("names") : Result<std::string_view>(std::string_view());
  Convention convention = Convention::kHf;
  for (const ConventionInfo& row : kConventions)
    if (title && row.title == *title) convention = row.convention;
  const Family& numbered_family = with_axes_of(catalog, numbered(*family, config), convention);
  const bool has_hf_rows = TRY(manifest.get_bool("hf_rows"));
  return canonical_view(catalog, {&numbered_family, config, has_hf_rows, true, true, convention}, nullptr);
}

Result<Identity> check_against_config(const Catalog& view, const Family& family, const ModelConfig& config,
                                      bool complete) {
  Identity out;
  std::vector<std::string> missing, extra;
  std::set<std::string, std::less<>> expected;
  const auto check_shape = [&](const Parameter& p) -> Status {
    const Dims shape = view.tensors()[*view.find(p.name)].joined_shape();
    if (p.is_scale ? is_shape_of_scales(shape, p.shape) : shape == p.shape) return {};
    const std::string flat = explain_flat(shape, p.shape);
    return corrupt(tensor_text(p.name) + ": " + config.path + " says " + to_string(p.shape) + ", got " +
                   to_string(shape) + (flat.empty() ? "" : ": " + flat));
  };
  for (const Parameter& p : TRY(parameters(family, config))) {
    expected.insert(p.name);
    out.expected += !p.is_tied;
    if (!view.find(p.name)) {
      if (!p.is_tied) missing.push_back(p.name);
      continue;
    }
    TRY(check_shape(p));
    out.present += !p.is_tied;
  }
  for (const Parameter& p : TRY(optional_parameters(family, config))) {
    expected.insert(p.name);
    if (view.find(p.name)) TRY(check_shape(p));
  }
  for (const Tensor& tensor : view.tensors()) {
    const StateKey key = split_state_key(tensor.key());
    if (key.kind != StateKind::kModel || expected.contains(key.parameter)) continue;
    const auto parsed = parse_name(family, key.parameter);
    if (parsed && parsed->layer >= config.num_hidden_layers() + config.num_prediction_layers())
      return corrupt(tensor_text(tensor.name) + ": " + config.path + " says num_hidden_layers " +
                     std::to_string(config.num_hidden_layers()));
    if (parsed) extra.push_back("'" + printable(tensor.name) + "'");
  }
  if (!extra.empty())
    return corrupt(view.where() + ": " + count_of(std::ssize(extra), "tensor") + " that " + config.path +
                   " does not describe: " + some_of(extra) + "; add --exclude to leave them out");
  if (missing.empty() || !complete) return out;
  return corrupt(view.where() + ": " + count_of(std::ssize(missing), "tensor") + " that " + config.path +
                 " describes " + (missing.size() == 1 ? "is" : "are") + " missing, the first is '" +
                 printable(missing.front()) + "'; add --allow config to write the others");
}

}  // namespace reshard
