// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/comparison.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "lib/audit/renaming.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/device/convert.h"
#include "lib/model/packing.h"
#include "lib/model/unknown_family.h"
#include "lib/model/view.h"
#include "lib/source/tensor_source.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr std::string_view kGroups = ".param_groups.", kExtraState = "extra_state.", kRandomState = "rng_state";

std::vector<std::size_t> all_tensors(const Catalog& catalog) {
  std::vector<std::size_t> out(catalog.tensors().size());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = i;
  return out;
}

// torch's name for the state of a module that is not a parameter or a buffer.
constexpr std::string_view kModuleState = "_extra_state";

// Returns the name up to the last dot; empty if there is none.
std::string_view parent_module(std::string_view key) {
  const std::size_t dot = key.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : key.substr(0, dot);
}

// Returns the modules around the model's tensors, without the outermost, which has no name.
std::set<std::string, std::less<>> modules_of(const Catalog& catalog) {
  std::set<std::string, std::less<>> out;
  for (const Tensor& t : catalog.tensors()) {
    if (state_kind(t.key()) != StateKind::kModel) continue;
    std::string_view module = parent_module(t.key());
    while (!module.empty() && out.emplace(module).second) module = parent_module(module);
  }
  return out;
}

struct KindCount {
  Index tensors = 0;
  Index bytes = 0;
};
std::array<KindCount, 3> count_kinds(const Catalog& catalog) {
  std::array<KindCount, 3> counts;
  for (const Tensor& t : catalog.tensors()) {
    KindCount& c = counts[static_cast<std::size_t>(split_state_key(t.key()).kind)];
    ++c.tensors;
    c.bytes += t.bytes();
  }
  return counts;
}

// Returns how many parameters have optimizer tensors with this suffix.
Index count_states(const Catalog& catalog, std::string_view suffix) {
  return std::count_if(catalog.tensors().begin(), catalog.tensors().end(), [&](const Tensor& t) {
    const StateKey key = split_state_key(t.key());
    return key.kind == StateKind::kOptimizer && key.suffix == suffix && key.prefix.ends_with(".state.");
  });
}

// Sums over one part of a pair of tensors; the sums of parts add up.
struct Sums {
  Index different = 0;
  double max_abs = 0, difference2 = 0, a2 = 0;

  void add(const Sums& o) {
    different += o.different;
    max_abs = std::max(max_abs, o.max_abs);
    difference2 += o.difference2;
    a2 += o.a2;
  }
};

Sums compare_floats(DType a_type, DType b_type, Bytes a, Bytes b, Index n) {
  constexpr Index kBlock = 4096;
  std::array<double, kBlock> x, y;
  Sums sums;
  for (Index done = 0; done < n; done += kBlock) {
    const Index m = std::min(kBlock, n - done);
    convert(a_type, DType::kFloat64, a.data() + done * byte_size(a_type), reinterpret_cast<std::byte*>(x.data()), m);
    convert(b_type, DType::kFloat64, b.data() + done * byte_size(b_type), reinterpret_cast<std::byte*>(y.data()), m);
    for (std::size_t i = 0; i < static_cast<std::size_t>(m); ++i) {
      sums.a2 += std::isfinite(x[i]) ? x[i] * x[i] : 0;
      if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
      ++sums.different;
      const double d = std::abs(x[i] - y[i]);
      // A NaN or infinity on one side only counts as an infinite distance.
      sums.max_abs = std::isnan(d) ? INFINITY : std::max(sums.max_abs, d);
      sums.difference2 += std::isnan(d) ? INFINITY : d * d;
    }
  }
  return sums;
}

// The location of a tensor's first element: file, extent and byte. It does not depend on the names in a view.
using FirstByte = std::tuple<std::uint32_t, Index, Index>;
std::optional<FirstByte> first_byte(const Tensor& t) {
  if (t.fragments.empty()) return std::nullopt;
  const Fragment first = t.fragments.get(0);
  return FirstByte{first.extent.file, first.extent.offset, first.start};
}

// The dtypes from which a checkpoint's tensors were converted, according to its own manifest; empty if it has none.
using Casts = std::map<FirstByte, DType>;

Result<Casts> recorded_casts(Reader& reader, const Model& model, Families families) {
  Casts out;
  const auto text = TRY(reader.side_file(std::string(kManifestFile), kMaxManifestBytes));
  if (!text) return out;
  const std::string path = path_join(reader.catalog().root, kManifestFile);
  const Json manifest = TRY(parse_json(*text, path));
  const Json* const recorded = manifest.find("tensors");
  if (!recorded || !recorded->is_object()) return corrupt(path + ": expected an object 'tensors'");
  const Catalog view = TRY(recorded_view(manifest, reader.catalog(), model.config_or_null(), families).context(path));
  for (const Tensor& t : view.tensors()) {
    const Json* const entry = recorded->find(t.name);
    const auto from = entry && entry->contains("source_dtype")
                          ? dtype_from_torch(TRY(entry->get_string("source_dtype")))
                          : std::nullopt;
    if (const auto at = first_byte(t); from && at) out.emplace(*at, *from);
  }
  return out;
}

// The wider of two floating-point dtypes contains all values of the narrower. Of two with equal width, neither contains
// the other.
bool are_of_one_width(const Tensor& a, const Tensor& b) {
  return a.dtype != b.dtype && can_convert(a.dtype, b.dtype) && byte_size(a.dtype) == byte_size(b.dtype);
}

bool is_cast_from(const Casts& casts, const Tensor& tensor, DType from) {
  const auto at = first_byte(tensor);
  const auto found = at ? casts.find(*at) : casts.end();
  return found != casts.end() && found->second == from;
}

// The dtypes in which the elements of two tensors are compared.
struct ComparedDtypes {
  DType a, b;
  Comparison::Cast cast = Comparison::Cast::kNone;
};

ComparedDtypes meet(const Tensor& a, const Tensor& b, const Casts& casts_a, const Casts& casts_b) {
  using Cast = Comparison::Cast;
  if (a.dtype == b.dtype || !can_convert(a.dtype, b.dtype)) return {a.dtype, b.dtype};
  if (!are_of_one_width(a, b)) {
    const DType narrower = byte_size(a.dtype) < byte_size(b.dtype) ? a.dtype : b.dtype;
    return {narrower, narrower, Cast::kNarrower};
  }
  if (is_cast_from(casts_b, b, a.dtype)) return {b.dtype, b.dtype, Cast::kRecorded};
  if (is_cast_from(casts_a, a, b.dtype)) return {a.dtype, a.dtype, Cast::kRecorded};
  return {DType::kFloat32, DType::kFloat32, Cast::kUnrecorded};
}

Sums compare_bytes(Bytes a, Bytes b, Index element_bytes) {
  Sums sums;
  const std::size_t width = element_bytes;
  for (std::size_t i = 0; i + width <= a.size(); i += width)
    if (std::memcmp(a.data() + i, b.data() + i, width) != 0) ++sums.different;
  return sums;
}

// Returns the values in another dtype, in `buffer` if that is not their own.
Bytes as_dtype(DType from, DType to, Bytes values, std::vector<std::byte>& buffer) {
  if (from == to) return values;
  const Index n = std::ssize(values) / byte_size(from);
  buffer.resize(static_cast<std::size_t>(n * byte_size(to)));
  convert(from, to, values.data(), buffer.data(), n);
  return buffer;
}

}  // namespace

DType compared_dtype(const Tensor& t, const Tensor& other) {
  const bool is_rounded = t.model_dtype == other.dtype && can_convert(t.dtype, other.dtype);
  return is_rounded ? other.dtype : t.dtype;
}

Result<std::unique_ptr<Comparison>> Comparison::prepare(Reader& a, Reader& b, ComparisonOptions options) {
  std::unique_ptr<Comparison> c(new Comparison(a, b, std::move(options)));
  TRY(c->make_views());
  TRY(c->match());
  if (c->a_model_.family || c->options_.model.is_none()) return c;
  c->match_renamed();
  TRY(c->leave_out_ties());
  return c;
}

Status Comparison::make_views() {
  std::tie(a_model_, b_model_) = TRY(recognise_pair());
  for (Reader* reader : {&a_, &b_})
    TRY(reader->locate(all_tensors(reader->catalog()), options_.run.threads, options_.spool));
  if (a_model_.family && !same_values(*a_model_.family, a_model_.convention, b_model_.convention))
    return unsupported(
        a_.catalog().root + " has " + std::string(info(a_model_.convention).title) + " and " + b_.catalog().root + " " +
        std::string(info(b_model_.convention).title) +
        ": they store other values of the same weights, such as queries divided by a root. Convert one " +
        "to the names of the other (reshard convert --names), then compare the result");
  const bool hf_rows = a_model_.family && !same_row_order(*a_model_.family, a_model_.convention, b_model_.convention);
  const auto view_of = [&](const Catalog& catalog, const Model& model, const Model& other) -> Result<Catalog> {
    if (!model.family && options_.model.is_none()) return catalog;
    if (!model.family) {
      auto plain = plain_view(catalog);
      return plain ? *std::move(plain) : catalog;
    }
    const ViewOptions how{model.family, model.config_or_null(), hf_rows,         true,
                          false,        model.convention,       other.convention};
    return canonical_view(catalog, how, nullptr);
  };
  auto a = view_of(a_.catalog(), a_model_, b_model_), b = view_of(b_.catalog(), b_model_, a_model_);
  if (!(a && b) && a_model_.family &&
      a_model_.convention == b_model_.convention) {  // without a config, names stay as they are
    a_model_.family = b_model_.family = nullptr;
    a = view_of(a_.catalog(), a_model_, b_model_);
    b = view_of(b_.catalog(), b_model_, a_model_);
  }
  a_view_ = TRY(std::move(a));
  b_view_ = TRY(std::move(b));
  return {};
}

// Recognises both as models of one family, or of none. The config of either applies to both.
Result<std::pair<Model, Model>> Comparison::recognise_pair() {
  if (options_.model.is_none()) return std::pair<Model, Model>();
  const Families families = options_.model.families;
  auto config_a = TRY(config_of(a_, options_.config, families)),
       config_b = TRY(config_of(b_, options_.config, families));
  if (!config_a) config_a = config_b;
  if (!config_b) config_b = config_a;
  Model a = TRY(recognise(a_.catalog(), options_.model, config_a));
  Model b = TRY(recognise(b_.catalog(), options_.model, config_b));
  if (a.family == b.family) return std::pair(std::move(a), std::move(b));
  const Family* said = config_a && a.family ? a.family : config_b ? b.family : nullptr;
  for (auto [model, catalog] : {std::pair(&a, &a_.catalog()), std::pair(&b, &b_.catalog())}) {
    const auto convention = said ? detect_convention(*said, *catalog) : std::nullopt;
    if (!convention) said = nullptr;
    if (convention) model->convention = *convention;
  }
  a.family = b.family = said;
  return std::pair(std::move(a), std::move(b));
}

Status Comparison::match() {
  const auto kinds_a = count_kinds(a_view_), kinds_b = count_kinds(b_view_);
  static constexpr std::array<std::string_view, 3> kTitles = {"model", "optimizer", "training state"};
  std::array<bool, 3> compared{};
  for (std::size_t k = 0; k < compared.size(); ++k) {
    compared[k] = k == 0 || (kinds_a[k].tensors > 0) == (kinds_b[k].tensors > 0);
    if (compared[k]) continue;
    const bool first = kinds_a[k].tensors > 0;
    const KindCount& c = first ? kinds_a[k] : kinds_b[k];
    not_compared_.push_back(std::string(kTitles[k]) + ": " + count_of(c.tensors, "tensor") + ", " +
                            human_bytes(c.bytes) + ", only in " + (first ? a_view_ : b_view_).root);
  }
  a_modules_ = modules_of(a_.catalog());
  b_modules_ = modules_of(b_.catalog());
  // A run and bare weights, or two formats, each have objects of their own.
  has_own_ = options_.of_two_formats || !compared[static_cast<std::size_t>(StateKind::kOptimizer)];
  has_own_groups_ = has_groups_of_its_own();
  // One of the two may count the optimizer's steps for all parameters, or have no masters apart from float32 weights.
  std::set<std::string_view> own_suffixes;
  for (const auto& [suffix, title] : {std::pair(kStepSuffix, "steps"), std::pair(kMasterSuffix, "masters")}) {
    const Index in_a = count_states(a_view_, suffix), in_b = count_states(b_view_, suffix);
    if ((in_a > 0) == (in_b > 0) || !compared[static_cast<std::size_t>(StateKind::kOptimizer)]) continue;
    own_suffixes.insert(suffix);
    not_compared_.push_back(std::string(title) + " of parameters: " + count_of(in_a + in_b, "tensor") + ", only in " +
                            (in_a > 0 ? a_view_ : b_view_).root);
  }
  const auto wanted = [&](const Tensor& t) {
    const StateKey key = split_state_key(t.key());
    return compared[static_cast<std::size_t>(key.kind)] &&
           !(key.kind == StateKind::kOptimizer && own_suffixes.contains(key.suffix));
  };
  for (std::size_t i = 0; i < a_view_.tensors().size(); ++i) {
    const Tensor& t = a_view_.tensors()[i];
    if (!wanted(t)) continue;
    const auto other = b_view_.find(t.name);
    if (!other) {
      if (!is_derived(t)) only_a_.push_back(i);
      continue;
    }
    if (t.shape != b_view_.tensors()[*other].shape) {
      const Index words = a_view_.vocabulary > 0 ? a_view_.vocabulary : b_view_.vocabulary;
      cut_padding(a_view_, i, words);
      cut_padding(b_view_, *other, words);
    }
    (t.shape == b_view_.tensors()[*other].shape ? pairs_ : reshaped_).push_back({i, *other});
  }
  for (std::size_t i = 0; i < b_view_.tensors().size(); ++i)
    if (const Tensor& t = b_view_.tensors()[i]; wanted(t) && !a_view_.find(t.name) && !is_derived(t))
      only_b_.push_back(i);
  const Objects of_a = objects_of(a_.catalog()), of_b = objects_of(b_.catalog());
  leave_out_own(a_view_, b_view_, a_.catalog(), of_b);
  leave_out_own(b_view_, a_view_, b_.catalog(), of_a);
  return {};
}

// Matches tensors that transformers' memory names differently than its files.
void Comparison::match_renamed() {
  const auto of_model = [](const Catalog& view, std::vector<std::size_t> tensors) {
    std::erase_if(tensors, [&](std::size_t i) { return state_kind(view.tensors()[i].name) != StateKind::kModel; });
    return tensors;
  };
  for (const Renaming& renaming :
       find_renamings(a_view_, of_model(a_view_, only_a_), b_view_, of_model(b_view_, only_b_))) {
    std::set<std::size_t> found_a, found_b;
    for (const auto& [a, b] : renaming.pairs) {
      found_a.insert(a);
      found_b.insert(b);
      pairs_.push_back({a, b});
    }
    std::erase_if(only_a_, [&](std::size_t i) { return found_a.contains(i); });
    std::erase_if(only_b_, [&](std::size_t i) { return found_b.contains(i); });
    renamed_.push_back("'" + printable(renaming.a) + "*' in " + a_view_.root + " is '" + printable(renaming.b) +
                       "*' in " + b_view_.root + ", " + count_of(std::ssize(renaming.pairs), "tensor"));
  }
}

// Returns whether a tensor may be an additional name of the same weights: a state_dict has all names of tied tensors,
// files have one. If config.json says that the head is not tied, only embeddings qualify, because a model with several
// may tie just these.
bool Comparison::may_be_tied(const Tensor& t) const {
  if (state_kind(t.name) != StateKind::kModel || t.shape.rank() == 0) return false;
  const ModelConfig* const config = a_model_.config ? a_model_.config_or_null() : b_model_.config_or_null();
  const bool is_denied = config && config->find("tie_word_embeddings") == Index{0};
  return !is_denied || is_embedding(t.name, options_.model.families);
}

Status Comparison::leave_out_ties() {
  for (const bool is_a : {true, false}) {
    const Catalog& view = is_a ? a_view_ : b_view_;
    std::vector<std::size_t>& alone = is_a ? only_a_ : only_b_;
    std::vector<DigestRequest> requests;
    std::set<std::size_t> wanted;
    for (const std::size_t i : alone) {
      const Tensor& t = view.tensors()[i];
      if (!may_be_tied(t)) continue;
      for (const Pair& p : pairs_) {
        const std::size_t other = is_a ? p.a : p.b;
        if (view.tensors()[other].shape == t.shape && view.tensors()[other].dtype == t.dtype) wanted.insert({i, other});
      }
    }
    for (const std::size_t i : wanted) requests.push_back({i, view.tensors()[i].dtype});
    if (requests.empty()) continue;
    FileSource source(view, (is_a ? a_ : b_).files());
    RunOptions run = options_.run;
    run.progress = nullptr;
    const auto proofs = TRY(digest_tensors(requests, source, run));
    std::map<std::size_t, Digest> digests;
    for (std::size_t k = 0; k < requests.size(); ++k) digests.emplace(requests[k].tensor, proofs[k].source);
    std::erase_if(alone, [&](std::size_t i) {
      if (!digests.contains(i)) return false;
      const Tensor& t = view.tensors()[i];
      const auto same = std::find_if(pairs_.begin(), pairs_.end(), [&](const Pair& p) {
        const std::size_t other = is_a ? p.a : p.b;
        return view.tensors()[other].shape == t.shape && digests.contains(other) && digests.at(other) == digests.at(i);
      });
      if (same == pairs_.end()) return false;
      not_compared_.push_back(tensor_text(t.name) + ", only in " + view.where() + ": the weights of " +
                              printable(view.tensors()[is_a ? same->a : same->b].name) + " once more");
      return true;
    });
  }
  return {};
}

// Returns whether a tensor is derived data that its writer declares not to be a parameter and no family knows; both
// sides need not have it.
bool Comparison::is_derived(const Tensor& t) const {
  return t.is_buffer && a_model_.family && !parse_name(*a_model_.family, split_state_key(t.key()).parameter);
}

bool Comparison::is_own(const Blob& blob) const {
  return (has_own_ && blob.name.starts_with(kExtraState)) ||
         (has_own_groups_ && split_state_key(blob.key()).prefix.ends_with(kGroups));
}

// Returns whether hyperparameters cannot be compared: that needs the same groups on both sides, and for two formats the
// same words.
bool Comparison::has_groups_of_its_own() const {
  struct Names {
    std::set<std::string> keys;
    std::set<std::string> groups;  // prefix and number; empty if each parameter has its own
  };
  const auto names = [&](const Catalog& catalog) {
    Names out;
    for (const Blob& blob : catalog.blobs) {
      const StateKey state = split_state_key(blob.key());
      if (!state.prefix.ends_with(kGroups)) continue;
      for (std::string& key : keys_of(catalog, blob)) out.keys.insert(std::move(key));
      if (as_number(state.parameter)) out.groups.insert(state.prefix + state.parameter);
    }
    return out;
  };
  const Names a = names(a_.catalog()), b = names(b_.catalog());
  return a.groups != b.groups || (options_.of_two_formats && a.keys != b.keys);
}

// Returns whether an object is a module's, like its extra state, and not the run's, like the number of steps.
bool Comparison::is_of_model(const Catalog& catalog, const Blob& blob) const {
  if (state_kind(blob.key()) != StateKind::kModel) return false;
  if (!blob.plain_key.empty()) return true;  // it was in the model's wrapper
  const auto& modules = &catalog == &a_.catalog() ? a_modules_ : b_modules_;
  return modules.contains(parent_module(blob.key())) || blob.key() == kModuleState;
}

// The run's objects next to a wrapped model have keys under "extra_state.". Next to a model without a wrapper, or in a
// format that leaves the wrapper out, they look like the model's.
std::string Comparison::key_of(const Catalog& catalog, const Blob& blob) const {
  const bool is_of_run = state_kind(blob.key()) == StateKind::kModel && !is_of_model(catalog, blob);
  return is_of_run ? std::string(kExtraState) + blob.key() : blob.key();
}

Comparison::Objects Comparison::objects_of(const Catalog& catalog) const {
  Objects out;
  for (const Blob& blob : catalog.blobs) {
    for (std::string& key : keys_of(catalog, blob)) out.keys.insert(std::move(key));
    if (!is_own(blob)) out.kinds.insert(kind_of(catalog, blob));
  }
  return out;
}

bool Comparison::is_in(const Objects& others, const Catalog& mine, const Blob& blob) const {
  const auto keys = keys_of(mine, blob);
  return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return others.keys.contains(key); });
}

// Returns whether one side may have an object alone: a format's own objects, states of random numbers, which each rank
// has, and the number of steps, which the other may store for each parameter.
bool Comparison::may_be_alone(const Blob& blob) const {
  const StateKey state = split_state_key(blob.key());
  return is_own(blob) || blob.name.starts_with(kExtraState) || blob.name.starts_with(kRandomState) ||
         (state.prefix.ends_with(kGroups) && state.suffix == kStepSuffix);
}

void Comparison::leave_out_own(const Catalog& view, const Catalog& other_view, const Catalog& mine,
                               const Objects& other_objects) {
  Index tensors = 0, objects = 0;
  for (const Tensor& t : view.tensors()) tensors += is_derived(t) && !other_view.find(t.name);
  for (const Blob& blob : mine.blobs)
    objects += is_own(blob) || (may_be_alone(blob) && !is_in(other_objects, mine, blob));
  if (tensors > 0) not_compared_.push_back("derived: " + count_of(tensors, "tensor") + ", only in " + mine.root);
  if (objects > 0) not_compared_.push_back("the format's own: " + count_of(objects, "object") + " of " + mine.root);
}

// Removes rows after the last word, but only if the writer says how many words there are.
void Comparison::cut_padding(Catalog& view, std::size_t tensor, Index words) const {
  Tensor& t = view.tensor(tensor);
  if (!a_model_.family || words == 0 || view.vocabulary != words || t.shape.rank() == 0 || t.shape[0] <= words) return;
  const auto parsed = parse_name(*a_model_.family, split_state_key(t.key()).parameter);
  if (!parsed || !parsed->rule->is_vocabulary()) return;
  PackedPart part;
  part.shape = t.shape;
  part.shape[0] = words;
  part.rows = {{0, 0, words, 1}};
  t = unpack(t, part, t.name);
}

Index Comparison::bytes() const {
  Index sum = 0;
  for (const Pair& p : pairs_) sum += a_view_.tensors()[p.a].bytes() + b_view_.tensors()[p.b].bytes();
  return sum;
}

Result<std::vector<Comparison::Digests>> Comparison::digests() {
  const bool needs_casts = std::any_of(pairs_.begin(), pairs_.end(), [&](const Pair& p) {
    return are_of_one_width(a_view_.tensors()[p.a], b_view_.tensors()[p.b]);
  });
  const Casts casts_a = needs_casts ? TRY(recorded_casts(a_, a_model_, options_.model.families)) : Casts();
  const Casts casts_b = needs_casts ? TRY(recorded_casts(b_, b_model_, options_.model.families)) : Casts();
  std::vector<DigestRequest> from_a, from_b;
  std::vector<ComparedDtypes> meetings;
  Index bytes_a = 0;
  for (const Pair& p : pairs_) {
    const Tensor &a = a_view_.tensors()[p.a], &b = b_view_.tensors()[p.b];
    const ComparedDtypes& m = meetings.emplace_back(meet(a, b, casts_a, casts_b));
    from_a.push_back({p.a, m.a});
    from_b.push_back({p.b, m.b});
    bytes_a += a.bytes();
  }
  FileSource source_a(a_view_, a_.files()), source_b(b_view_, b_.files());
  const auto proofs_a = TRY(digest_tensors(from_a, source_a, options_.run));
  RunOptions second = options_.run;
  if (second.progress) second.progress = [&](Index done) { options_.run.progress(bytes_a + done); };
  const auto proofs_b = TRY(digest_tensors(from_b, source_b, second));
  checksums_ = source_a.checksums_checked() + source_b.checksums_checked();
  std::vector<Digests> out;
  for (std::size_t i = 0; i < pairs_.size(); ++i)
    out.push_back({proofs_a[i].source, proofs_b[i].source, proofs_a[i].target, proofs_b[i].target, meetings[i].cast});
  return out;
}

std::vector<std::string> Comparison::keys_of(const Catalog& catalog, const Blob& blob) const {
  const std::string key = key_of(catalog, blob);
  if (!a_model_.family) return {key};
  const Model& with_config = a_model_.config ? a_model_ : b_model_;
  return canonical_keys(*a_model_.family, catalog, with_config.config_or_null(), key);
}

std::vector<std::string> Comparison::structural_differences() const {
  std::vector<std::string> out;
  for (const std::size_t i : only_a_)
    out.push_back(tensor_text(a_view_.tensors()[i].name) + " is only in " + a_view_.root);
  for (const std::size_t i : only_b_)
    out.push_back(tensor_text(b_view_.tensors()[i].name) + " is only in " + b_view_.root);
  for (const Pair& p : reshaped_)
    out.push_back(tensor_text(a_view_.tensors()[p.a].name) + ": shape " +
                  to_string(a_view_.tensors()[p.a].joined_shape()) + " in " + a_view_.root + ", " +
                  to_string(b_view_.tensors()[p.b].joined_shape()) + " in " + b_view_.root);
  for (std::string& text : objects_of_one()) out.push_back(std::move(text));
  return out;
}

std::vector<std::string> Comparison::objects_of_one() const {
  std::vector<std::string> out;
  const auto look = [&](const Catalog& mine, const Objects& others) {
    for (const Blob& blob : mine.blobs)
      if (others.kinds.contains(kind_of(mine, blob)) && !may_be_alone(blob) && !is_in(others, mine, blob))
        out.push_back("object '" + printable(blob.name) + "' is only in " + mine.root);
  };
  const Objects of_a = objects_of(a_.catalog()), of_b = objects_of(b_.catalog());
  look(a_.catalog(), of_b);
  look(b_.catalog(), of_a);
  return out;
}

Result<std::vector<std::string>> Comparison::differing_objects() {
  std::vector<std::string> out;
  std::set<std::string> unread;
  std::unordered_map<std::string, const Blob*> in_b;
  for (const Blob& blob : b_.catalog().blobs)
    for (std::string& key : keys_of(b_.catalog(), blob)) in_b.emplace(std::move(key), &blob);
  for (const Blob& blob : a_.catalog().blobs) {
    const StateKey state = split_state_key(blob.key());
    if (is_own(blob) || (state.prefix.ends_with(kGroups) && state.suffix == ".params")) continue;  // in any order
    bool differs = false;
    for (const std::string& key : keys_of(a_.catalog(), blob)) {
      const auto other = in_b.find(key);
      if (other == in_b.end() || differs) continue;
      const auto mine = a_.blob_bytes(blob), others = b_.blob_bytes(*other->second);
      for (const auto* bytes : {&mine, &others})
        if (!*bytes && bytes->error().code() != ErrorCode::kUnsupported) return bytes->error();
      differs = mine && others && *mine != *others && !(options_.same_value && options_.same_value(*mine, *others));
      if (!mine || !others) unread.insert(blob.name);
    }
    if (differs) out.push_back(blob.name);
  }
  if (!unread.empty())
    not_compared_.push_back("objects of a form that reshard does not read: " + folded({unread.begin(), unread.end()}));
  return out;
}

Result<std::vector<Comparison::Distance>> Comparison::distances() {
  std::vector<PairRequest> requests;
  for (const Pair& p : pairs_) requests.push_back({p.a, p.b});
  FileSource source_a(a_view_, a_.files()), source_b(b_view_, b_.files());
  std::vector<Sums> sums(pairs_.size());
  std::mutex mutex;
  TRY(visit_pairs(requests, source_a, source_b, options_.run, [&](std::size_t i, const Box& box, Bytes a, Bytes b) {
    const Tensor &of_a = a_view_.tensors()[pairs_[i].a], &of_b = b_view_.tensors()[pairs_[i].b];
    const DType ta = compared_dtype(of_a, of_b), tb = compared_dtype(of_b, of_a);
    std::vector<std::byte> rounded_a, rounded_b;
    a = as_dtype(of_a.dtype, ta, a, rounded_a);
    b = as_dtype(of_b.dtype, tb, b, rounded_b);
    Sums part;
    if (is_floating(ta) && is_floating(tb))
      part = compare_floats(ta, tb, a, b, volume(box));
    else if (ta == tb)
      part = compare_bytes(a, b, byte_size(ta));
    else
      part.different = volume(box);
    const std::lock_guard lock(mutex);
    sums[i].add(part);
  }));
  checksums_ = source_a.checksums_checked() + source_b.checksums_checked();
  TRY(combine_values(options_.run.ranks, std::span(sums), [](Sums& all, const Sums& more) { all.add(more); }));
  std::vector<Distance> out;
  for (const Sums& s : sums) {
    const double relative = s.difference2 == 0 ? 0 : s.a2 > 0 ? std::sqrt(s.difference2 / s.a2) : INFINITY;
    out.push_back({s.different, s.max_abs, relative, std::sqrt(s.difference2), std::sqrt(s.a2)});
  }
  return out;
}

}  // namespace reshard
