// The canonical view. See view.h.
#include "lib/model/view.h"

#include <algorithm>
#include <set>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/packing.h"
#include "lib/model/parameters.h"

namespace reshard {
namespace {

Tensor renamed(const Tensor& from, std::string name) {
  Tensor out = from;
  out.name = std::move(name);
  out.plain_key.clear();
  return out;
}

// ---- the view, tensor by tensor

class ViewBuilder {
 public:
  ViewBuilder(const Catalog& from, const ViewOptions& options, std::vector<std::string>* dropped)
      : from_(from), options_(options), dropped_(dropped) {}

  Result<Catalog> build() {
    out_.root = from_.root;
    out_.files = from_.files;
    out_.blobs = from_.blobs;
    out_.attributes = from_.attributes;
    out_.vocabulary = from_.vocabulary;
    TRY(out_.reserve(from_.tensors().size()));
    for (const Tensor& tensor : from_.tensors()) TRY(add(tensor));
    if (!unknown_.empty()) return unknown_error();
    if (!twice_.empty()) return twice_error();
    add_tied_head();
    out_.sort_by_name();
    return std::move(out_);
  }

 private:
  Status add(const Tensor& tensor) {
    const StateKey key = split_state_key(tensor.key());
    const auto parsed =
        key.parameter.empty()
            ? std::nullopt
            : TRY(parse_tensor(*options_.family, key.parameter, tensor.shape, options_.config, what(tensor)));
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
    if (parsed->rule->is_dropped()) {
      if (dropped_) dropped_->push_back(tensor.name);
      return {};
    }
    if (parsed->is_packed()) return add_parts(tensor, key, *parsed);
    const bool is_paired = parsed->stored && is_rotary(parsed->stored->form) && tensor.shape.rank() > 0;
    if (is_paired && options_.hf_rows) return add_parts(tensor, key, *parsed);
    return put(renamed(tensor, key.prefix + canonical_name(*parsed) + key.suffix));
  }

  // A name that is taken is an error in the end, with all others.
  Status put(Tensor tensor) {
    if (!out_.find(tensor.name)) return out_.add(std::move(tensor));
    twice_.push_back(std::move(tensor));
    return {};
  }

  Status add_parts(const Tensor& tensor, const StateKey& key, const ParsedName& parsed) {
    if (tensor.shape.rank() == 0) {  // an optimizer's step counts for all parts; stored it is the first one's
      std::vector<std::string> names = part_names(parsed, TRY(experts_of(tensor, key)));
      if (options_.as_stored) names.resize(1);
      for (const std::string& name : names) TRY(put(renamed(tensor, key.prefix + name + key.suffix)));
      return {};
    }
    for (const PackedPart& part : TRY(parts_of(parsed, tensor.shape, options_.config, options_.hf_rows, what(tensor))))
      TRY(put(unpack(tensor, part, key.prefix + part.name + key.suffix)));
    return {};
  }

  // How many experts the parameter of an optimizer's number has.
  Result<Index> experts_of(const Tensor& tensor, const StateKey& key) const {
    const auto parameter = from_.find_parameter(key.parameter);
    if (parameter && from_.tensors()[*parameter].shape.rank() > 0) return from_.tensors()[*parameter].shape[0];
    if (const Index n = options_.config ? options_.config->number("num_experts") : 0; n > 0) return n;
    return usage_error(what(tensor) +
                       ": counts for the experts of a tensor that is not there, and no config.json says " +
                       "how many they are; give one with --config");
  }

  static std::string what(const Tensor& tensor) { return tensor_text(tensor.name); }

  // A tied model stores the embedding once: the head is a second tensor over the same bytes.
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
    return unsupported(
        from_.root + ": " + count_of(std::ssize(unknown_), "tensor") +
        (unknown_.size() == 1 ? " has a name" : " have names") + " that family " + std::string(options_.family->name) +
        " does not know (--keep-unknown carries them as they are, " + "--exclude leaves them out):" + list);
  }

  Error twice_error() const {
    constexpr std::size_t kShown = 4;
    std::string list;
    for (std::size_t i = 0; i < std::min(twice_.size(), kShown); ++i)
      list += "\n  " + printable(twice_[i].name) + " of " + file_of(out_.tensors()[*out_.find(twice_[i].name)]) +
              " and of " + file_of(twice_[i]);
    if (twice_.size() > kShown) list += "\n  and " + with_commas(std::ssize(twice_) - Index{kShown}) + " more";
    return corrupt(from_.root + ": " + count_of(std::ssize(twice_), "tensor") + (twice_.size() == 1 ? " is" : " are") +
                   " there twice, under two names; --exclude leaves one of them out:" + list);
  }
  std::string file_of(const Tensor& t) const {
    return t.fragments.empty() ? "no file" : printable(from_.files[t.fragments.extent(0).file].path);
  }

  const Catalog& from_;
  const ViewOptions& options_;
  std::vector<std::string>* dropped_;
  Catalog out_;
  std::vector<std::string> unknown_;
  std::vector<Tensor> twice_;  // under canonical names that others had already
};

}  // namespace

Result<Catalog> canonical_view(const Catalog& catalog, const ViewOptions& options, std::vector<std::string>* dropped) {
  return ViewBuilder(catalog, options, dropped).build();
}

Result<Catalog> plain_view(Catalog catalog) {
  const auto& tensors = catalog.tensors();
  if (std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.plain_key.empty(); })) return catalog;
  Catalog out;
  out.root = catalog.root;
  out.files = catalog.files;
  out.blobs = catalog.blobs;
  out.attributes = catalog.attributes;
  out.vocabulary = catalog.vocabulary;
  TRY(out.reserve(tensors.size()));
  for (const Tensor& t : tensors) TRY(out.add(renamed(t, t.key())));
  out.sort_by_name();
  return out;
}

Result<const Family*> recorded_family(const Json& manifest) {
  const Json* const name = manifest.find("family");
  if (!name || name->is_null()) return nullptr;
  if (const Family* const family = find_family(TRY(name->as_string()))) return family;
  return unsupported("family '" + printable(TRY(name->as_string())) +
                     "' is none that this version knows; where it is one of yours, --family-file says what it is");
}

Result<Catalog> recorded_view(const Json& manifest, const Catalog& catalog, const ModelConfig* config) {
  const Family* const family = TRY(recorded_family(manifest));
  if (!family) return catalog;
  return canonical_view(catalog, {family, config, TRY(manifest.get_bool("hf_rows")), true, true}, nullptr);
}

Result<Identity> check_against_config(const Catalog& view, const Family& family, const ModelConfig& config,
                                      bool complete) {
  Identity out;
  std::vector<std::string> missing, extra;
  std::set<std::string, std::less<>> expected;
  const auto check_shape = [&](const Parameter& p) -> Status {
    const Dims& shape = view.tensors()[*view.find(p.name)].shape;
    if (p.is_scale ? is_shape_of_scales(shape, p.shape) : shape == p.shape) return {};
    return corrupt(tensor_text(p.name) + ": " + config.path + " says " + to_string(p.shape) + ", got " +
                   to_string(shape));
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
    return corrupt(view.root + ": " + count_of(std::ssize(extra), "tensor") + " that " + config.path +
                   " does not describe: " + some_of(extra) + "; --exclude leaves them out");
  if (missing.empty() || !complete) return out;
  return corrupt(view.root + ": " + std::to_string(missing.size()) + " tensors that " + config.path +
                 " describes are missing, the first is '" + missing.front() + "'");
}

}  // namespace reshard
