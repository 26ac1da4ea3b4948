// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/steps.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "lib/base/names.h"
#include "lib/base/shell.h"
#include "lib/base/storage/storage.h"
#include "lib/base/text.h"
#include "lib/checkpoint/cover_checker.h"
#include "lib/checkpoint/model_code.h"
#include "lib/checkpoint/side_files.h"
#include "lib/convert/view/row_edits.h"
#include "lib/convert/weights/adapter.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/device/convert.h"
#include "lib/layout/padded_vocabulary.h"
#include "lib/layout/stages.h"
#include "lib/model/config.h"
#include "lib/model/kept_dtypes.h"
#include "lib/model/packing.h"
#include "lib/model/parts.h"
#include "lib/model/placement.h"
#include "lib/model/shapes.h"
#include "lib/model/view.h"

namespace reshard {
namespace {

// Returns the rule of a key's parameter.
std::optional<ParsedName> parse_key(const Family* family, const StateKey& key) {
  return family && !key.parameter.empty() ? parse_name(*family, key.parameter) : std::nullopt;
}

// Fails if the config describes a plain weight that the source has packed.
Status check_described_packed(const SourceView& view, const Family& family, const ModelConfig& config) {
  if (!config.quantization.empty()) return {};
  const SourceView::Packed* first = nullptr;
  for (const auto& [name, part] : view.packed)
    if (!part.name.empty() && !is_known_to_families(part.packing) && (!first || natural_less(part.name, first->name)) &&
        !view.catalog.find(canonical_key(family, part.name)))
      first = &part;
  if (!first) return {};
  return unsupported(view.catalog.where() + ": '" + printable(first->name) + "' is packed as " +
                     std::string(packing_title(first->packing)) + ", and " + config.path +
                     " describes a plain weight; " +
                     (can_unpack(first->packing) ? "add --dtype bfloat16 to unpack it"
                                                 : "this quantization is not unpacked, so convert plain weights") +
                     ", or add --family none to copy the packed tensors unchanged");
}

}  // namespace

Result<std::optional<Identity>> repair(SourceView& view, FilePool& files, const RepairOptions& options, bool complete,
                                       bool allow, ConversionNotes& notes) {
  RepairOptions of_view = options;
  of_view.is_stored = [&view](const std::string& canonical) { return view.is_stored(canonical); };
  if (!options.config) {
    if (options.repairs.vocabulary || options.repairs.experts)
      return usage_error("--repair needs the model's config.json; add it with --config");
  } else if (auto fitted = repair_to_config(view.catalog, files, of_view)) {
    for (std::string& note : fitted->notes) notes.warnings.push_back(std::move(note));
    notes.repairs = std::move(fitted->repairs);
  } else {
    if (!allow) return std::move(fitted).error();
    notes.warnings.push_back(fitted.error().message());
  }
  CoverChecker covers;
  for (const Tensor& t : view.catalog.tensors()) TRY(covers.check(t));
  if (!options.config) {
    if (const Status agree = check_shapes_agree(*options.family, view.catalog); !agree) {
      const std::string fault = view.catalog.where() + ": has the tensor names of family " + options.family->name +
                                ", but not its shapes: " + agree.error().message();
      if (!allow)
        return Error(agree.error().code(), fault + "; add --config FILE if it is such a model, --family none to " +
                                               "keep names and rows as they are, or --allow config to write it anyway");
      notes.warnings.push_back(fault);
    }
    notes.warnings.push_back("no config.json: the names match family " + options.family->name +
                             ", but the model may be incomplete; add --config FILE to check it");
    return std::optional<Identity>();
  }
  const auto fits = check_against_config(view.catalog, *options.family, *options.config, complete);
  if (fits) return fits->present > 0 ? std::optional(*fits) : std::nullopt;
  const Error& error = fits.error();
  if (!allow) TRY(check_described_packed(view, *options.family, *options.config));
  if (!allow)
    return Error(error.code(), error.message() + "; reshard verify explains it; add --allow config to write it anyway");
  notes.warnings.push_back(error.message());
  return std::optional<Identity>();
}

namespace {

// Pads `rows` as --vocab-divisible-by asks.
Result<Index> padded_to_multiple(Index rows, Index divisible_by, const Mesh& mesh) {
  const auto padded = padded_vocabulary(rows, divisible_by, mesh.size("tp"));
  if (!padded) return usage_error("--vocab-divisible-by: " + count_of(rows, "row") + " are too many to pad");
  return *padded;
}

// Returns how many ranks hold each key-value head: as the layout says or, in files that ranks load as they are, as many
// as share a head.
Index head_copies(const ModelConfig* config, const RankPlacement& on, const Format& format) {
  if (on.layout) return on.layout->kv_heads ? on.layout->kv_heads->replication : 1;
  const Index tp = on.mesh.size("tp"), heads = config ? config->num_key_value_heads() : 0;
  return format.holds_local_tensors() && heads > 0 && tp > heads && tp % heads == 0 ? tp / heads : 1;
}

// Fails if the tensor is part of a packed weight that is written as it is stored.
Status check_not_packed(const SourceView& view, const Tensor& tensor, std::string_view to_do) {
  const auto i = view.catalog.find(tensor.name);
  if (!view.packed.contains(tensor.name) || (i && view.computed.contains(*i))) return {};
  return unsupported(tensor_text(view.native(tensor.name)) + " is part of a packed weight and cannot " +
                     std::string(to_do) + "; add --dtype bfloat16 to unpack weights of a supported quantization");
}

// Returns the tensor that the output stores instead of a tied head; nothing for other tensors.
const NameRule* tied_rule(const Family& family, std::string_view canonical) {
  const auto parsed = parse_name(family, canonical);
  return parsed && !parsed->rule->tied_to.empty() ? parsed->rule : nullptr;
}

}  // namespace

Status pad_vocabulary(SourceView& view, FilePool& files, const Translation& names, const VocabularyRows& rows,
                      const RankPlacement& on, const Format& format, const RepairOptions& options,
                      ConversionNotes& notes) {
  const auto* vocabulary = on.layout && on.layout->vocabulary ? &*on.layout->vocabulary : nullptr;
  const bool follows = format.holds_local_tensors() || !on.layout || on.layout->stored_as == StoredAs::kShards;
  const bool by_layout = vocabulary && follows && (vocabulary->divisible_by || vocabulary->padded_size);
  const bool by_format = !by_layout && rows.vocab_divisible_by == 0;
  const Index divisible_by = by_format ? format.vocab_divisible_by : rows.vocab_divisible_by;
  if (!by_layout && divisible_by == 0) {
    if (rows.vocab_padding)
      return usage_error(
          "--vocab-padding needs the number of rows to add; give it with --vocab-divisible-by or a "
          "layout");
    return {};
  }
  auto fill = rows.vocab_padding;
  if (!fill && by_layout && vocabulary->padding == PaddingContent::kZero) fill = PaddingFill::kZero;
  if (!fill && format.vocab_divisible_by > 0) fill = PaddingFill::kRepeatLast;
  std::vector<std::string> padded;
  Index added = 0;
  for (std::size_t i = 0; i < view.catalog.tensors().size(); ++i) {
    const Tensor& t = view.catalog.tensors()[i];
    const StateKey key = split_state_key(t.key());
    if (key.parameter.empty() || t.shape.rank() == 0) continue;
    const std::string name = names.target_name(t.name, view.key(t.name));
    const auto parsed = parse_key(names.model.family, key);
    if (by_layout ? !any_glob_matches(vocabulary->tensors, name) : !parsed || !parsed->rule->is_vocabulary()) continue;
    const Index wanted =
        TRY(by_layout ? on.layout->padded_rows(t.shape[0]) : padded_to_multiple(t.shape[0], divisible_by, on.mesh));
    if (wanted <= t.shape[0]) continue;  // the layout reports the error
    TRY(check_not_packed(view, t, "be padded"));
    if (!fill)
      return usage_error(tensor_text(name) + " has " + count_of(t.shape[0], "row") + ", the target's vocabulary " +
                         with_commas(wanted) +
                         "; choose the content of the added rows with --vocab-padding zero, repeat-last or mean");
    added = wanted - t.shape[0];
    padded.push_back(name);
    if (view.catalog.vocabulary == 0) view.catalog.vocabulary = t.shape[0];
    TRY(pad_rows(view.catalog, i, wanted, *fill, files, options.spool, !options.metadata_only));
  }
  if (padded.empty()) return {};
  notes.warnings.push_back(count_of(added, "row") + " (" + std::string(padding_fill_name(*fill)) +
                           ") are added to the vocabulary of " + printable(padded.front()) +
                           (padded.size() > 1 ? " and " + count_of(std::ssize(padded) - 1, "other") : "") + ".");
  Json tensors = Json::array();
  for (const std::string& name : padded) tensors.push_back(name);
  notes.repairs.push_back(Json::object()
                              .set("what", "vocabulary padded")
                              .set("padding", padding_fill_name(*fill))
                              .set("rows", added)
                              .set("tensors", std::move(tensors)));
  return {};
}

Status repeat_heads(SourceView& view, const Translation& names, const RankPlacement& on, const Format& format,
                    ConversionNotes& notes) {
  const ModelConfig* config = names.model.config_or_null();
  const Index copies = head_copies(config, on, format);
  if (copies == 1) return {};
  if (!config)
    return usage_error("layout '" + printable(on.layout->name) + "' repeats key-value heads, and no config.json " +
                       "gives their number; add one with --config");
  const Index heads = config->num_key_value_heads();
  Index repeated = 0;
  for (std::size_t i = 0; i < view.catalog.tensors().size(); ++i) {
    Tensor& t = view.catalog.tensor(i);
    const auto parsed = parse_key(names.model.family, split_state_key(t.key()));
    const bool is_heads = parsed && !parsed->is_packed() && !parsed->is_of_quantized() &&
                          parsed->rule->heads == "num_key_value_heads" && parsed->rule->tp_dim == 0;
    const bool wanted =
        on.layout ? any_glob_matches(on.layout->kv_heads->tensors, names.target_name(t.name, view.key(t.name)))
                  : is_heads;
    if (!wanted || t.shape.rank() == 0) continue;
    TRY(check_not_packed(view, t, "have its key-value heads repeated"));
    if (view.computed.contains(i))
      return unsupported(tensor_text(t.name) + ": the layout repeats key-value heads, which is not supported for " +
                         "quantized matrices; convert the checkpoint to hf first");
    if (!is_heads || t.shape[0] % heads != 0)
      return unsupported(tensor_text(t.name) + " " + to_string(t.shape) + ": the layout repeats key-value " +
                         "heads; expected rows that are a multiple of " + with_commas(heads));
    repeat_blocks(t, t.shape[0] / heads, copies);
    ++repeated;
  }
  if (repeated > 0)
    notes.warnings.push_back("Each key-value head is held by " + count_of(copies, "rank") + ": " +
                             count_of(repeated, "tensor") + " become " + with_commas(copies) + " times as long.");
  return {};
}

// ---- the output's tensors

namespace {

// Returns whether the tensor is part of a packed weight that no rule of the family shards.
bool is_uncut(const SourceView& view, const Model& model, const std::string& canonical) {
  const auto i = view.catalog.find(canonical);
  if (!view.packed.contains(canonical) || (i && view.computed.contains(*i))) return false;
  return !model.family || !view.is_known_to_families(canonical);
}

// Returns whether a convention has a name for the tensor.
bool can_name(const SourceView& view, const Model& model, const std::string& canonical, Convention to) {
  if (const auto i = view.catalog.find(canonical); i && view.computed.contains(*i)) return true;
  if (view.packed.contains(canonical) && !view.is_known_to_families(canonical)) return false;
  const auto parsed = parse_name(*model.family, canonical);
  return !parsed || can_name(*model.family, *parsed, to);
}

// Notes which packed weights --dtype leaves unchanged.
void note_packed(const SourceView& view, const Translation& names, const DtypeOptions& typing, ConversionNotes& notes) {
  if (!typing.dtype) return;
  std::set<std::string_view> kept;
  for (std::size_t i = 0; i < view.catalog.tensors().size(); ++i)
    if (const auto found = view.packed.find(view.catalog.tensors()[i].name);
        found != view.packed.end() && !view.computed.contains(i) && !view.applied.contains(i))
      kept.insert(found->second.name);
  PackedWeights left;
  for (const PackedWeight& weight : names.packed.weights)
    if (kept.contains(weight.name)) left.weights.push_back(weight);
  if (left.empty()) return;
  notes.warnings.push_back(packed_text(left) + ": --dtype does not apply to their tensors, which are kept as they are");
}

// Warns of optimizer state under names that no parameter has: it is not renamed or resharded with the model.
void note_orphans(const SourceView& view, const Family& family, const std::vector<std::size_t>& tensors,
                  ConversionNotes& notes) {
  std::vector<std::string> orphans;
  bool has_model = false;
  for (const std::size_t i : tensors) {
    const Tensor& tensor = view.catalog.tensors()[i];
    const StateKey key = split_state_key(tensor.key());
    has_model = has_model || key.kind == StateKind::kModel;
    if (key.kind != StateKind::kOptimizer || key.parameter.empty()) continue;
    if (parse_name(family, key.parameter) || view.catalog.find(key.parameter)) continue;
    orphans.push_back("'" + printable(view.native(tensor.name)) + "'");
  }
  if (!has_model || orphans.empty()) return;
  notes.warnings.push_back("Optimizer state without a parameter in the model, " +
                           count_of(std::ssize(orphans), "tensor") + " (" + some_of(orphans) +
                           "), keeps its names and its row order.");
}

// Decides the dtypes of the output's tensors.
class TargetDtypes {
 public:
  TargetDtypes(const SourceView& view, const Translation& names, const DtypeOptions& typing)
      : view_(view), family_(names.model.family), config_(names.said ? &*names.said : nullptr), typing_(typing) {}

  // Returns the dtype of a tensor of the view. Some keep their own dtype, because transformers loads them so, or
  // because quantized values mean nothing without their scales.
  Result<DType> of(std::size_t number) {
    const Tensor& tensor = view_.catalog.tensors()[number];
    if (view_.computed.contains(number)) return tensor.dtype;
    const DType own = tensor.model_dtype.value_or(tensor.dtype), as = typing_.dtype.value_or(own);
    const std::string native = view_.native(tensor.name);
    const StateKey key = split_state_key(tensor.key());
    if (!typing_.dtype || key.kind != StateKind::kModel || !can_convert(tensor.dtype, as) ||
        typing_.keeps(native, tensor.name) || view_.packed.contains(tensor.name))
      return own;
    if (const auto kept = kept_dtype(family_, config_, key.parameter, as)) {
      if (!can_convert(tensor.dtype, *kept)) return own;
      if (*kept != as) kept_.push_back("'" + printable(native) + "'");
      return *kept;
    }
    if (as == own) return own;
    const auto parsed = parse_key(family_, key);
    if (parsed && parsed->is_of_quantized()) return own;
    if (parsed && parsed->rule->quantized == Quantized::kFloat8 && byte_size(tensor.dtype) == 1)
      return unsupported(
          tensor_text(native) + " is " + std::string(info(tensor.dtype).torch_name) +
          " with separate scales, and no config.json gives their block size; add it with --config, or --keep-dtype '" +
          printable(native) + "' to keep it unchanged");
    narrows_ = narrows_ || (byte_size(as) < byte_size(own) && byte_size(as) < byte_size(DType::kFloat32));
    return as;
  }

  // Notes which tensors keep their dtype, and whether that is unknown because transformers has no such model.
  void note(ConversionNotes& notes) const {
    if (!kept_.empty()) {
      notes.warnings.push_back(count_of(std::ssize(kept_), "tensor") + " (" + some_of(kept_) +
                               (kept_.size() == 1 ? ") keeps its" : ") keep their") +
                               " own dtype, as when transformers loads the model in " +
                               std::string(info(*typing_.dtype).torch_name) + ".");
    } else if (narrows_ && !family_ && config_ && !knows_kept_dtypes(*config_)) {
      notes.warnings.push_back("transformers " + std::string(kept_dtypes_version()) + " has no model_type '" +
                               printable(config_->model_type) + "': every floating-point tensor becomes " +
                               std::string(info(*typing_.dtype).torch_name) +
                               ", including any that the model needs in float32; add --keep-dtype GLOB to keep those.");
    }
  }

 private:
  const SourceView& view_;
  const Family* const family_;       // may be null
  const ModelConfig* const config_;  // may be null
  const DtypeOptions& typing_;
  std::vector<std::string> kept_;  // for messages
  bool narrows_ = false;
};

// Returns the tensors of the view that the output stores, without a head that is tied to its embedding, which must then
// be equal to it.
std::vector<std::size_t> untied(const SourceView& view, const Translation& names, OutputTensors& out,
                                ConversionNotes& notes) {
  const auto& tensors = view.catalog.tensors();
  const Model& model = names.model;
  std::vector<std::size_t> taken;
  const bool ties = names.renames() && info(*names.to).ties_once && model.config && model.config->tie_word_embeddings();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (view.values.contains(i) || view.applied.contains(i)) continue;
    const NameRule* tied = ties ? tied_rule(*model.family, tensors[i].name) : nullptr;
    if (!tied) {
      taken.push_back(i);
      continue;
    }
    if (!view.is_stored(tensors[i].name)) continue;
    notes.left_out.push_back({"output head, tied to the embedding", 1, 0, tensors[i].bytes()});
    if (const auto embedding = view.catalog.find(tied->tied_to))
      out.equal.push_back({*embedding, i,
                           model.config->path + " says tie_word_embeddings, but the stored head differs from the " +
                               "embedding: writing only one of them would lose the other. Set " +
                               "tie_word_embeddings to false to keep both"});
  }
  return taken;
}

// Fails if the output's convention has no names for some of the tensors.
Status check_have_names(const SourceView& view, const Translation& names, const std::vector<std::size_t>& taken) {
  if (!names.renames() || (names.to == Convention::kHf && names.model.convention == Convention::kHf)) return {};
  std::vector<std::string> scales;
  for (const std::size_t i : taken) {
    const std::string& name = view.catalog.tensors()[i].name;
    if (!can_name(view, names.model, name, *names.to)) scales.push_back("'" + printable(view.native(name)) + "'");
  }
  if (scales.empty()) return {};
  return unsupported(view.catalog.where() + ": " + count_of(std::ssize(scales), "tensor") +
                     " are quantized values or their scales (" + some_of(scales) + "), and " +
                     std::string(info(*names.to).title) +
                     " has no names for them: a loader would use one without the other");
}

// Decides name, dtype and shape of the output's tensors, one after the other.
class OutputNamer {
 public:
  OutputNamer(const SourceView& view, const Translation& names, const DtypeOptions& typing, OutputTensors& out)
      : view_(view), names_(names), typing_(typing), dtypes_(view, names, typing), out_(out) {}

  // Adds the tensor that is made of the tensors of a group.
  Status add(const PackedGroup& group);
  // Adds a tensor that is one of the view's.
  Status add(std::size_t number) {
    const std::string& name = view_.catalog.tensors()[number].name;
    return add(PackedGroup{names_.target_name(name, view_.key(name)), nullptr, {number}});
  }
  void note(ConversionNotes& notes) const { dtypes_.note(notes); }

 private:
  Result<DType> dtype_of(const PackedGroup& group);

  const SourceView& view_;
  const Translation& names_;
  const DtypeOptions& typing_;
  TargetDtypes dtypes_;
  OutputTensors& out_;
};

// Also counts the conversions. Scalars of a group, such as steps, must be equal.
Result<DType> OutputNamer::dtype_of(const PackedGroup& group) {
  std::optional<DType> dtype;
  const Tensor& first = view_.catalog.tensors()[group.parts[0]];
  for (const std::size_t part : group.parts) {
    const Tensor& tensor = view_.catalog.tensors()[part];
    const DType as = TRY(dtypes_.of(part));
    if (dtype && *dtype != as)
      return unsupported(tensor_text(group.name) + " of the output combines tensors of " +
                         std::string(info(*dtype).torch_name) + " and " + std::string(info(as).torch_name));
    dtype = as;
    if (as != tensor.dtype || (view_.computed.contains(part) && typing_.quantize == Quantization::kNone))
      ++out_.converted;
    if (&tensor != &first && tensor.shape.rank() == 0)
      out_.equal.push_back({group.parts[0], part,
                            tensor_text(tensor.name) + " differs from '" + printable(first.name) +
                                "', and the output's '" + printable(group.name) + "' replaces both"});
  }
  return *dtype;
}

Status OutputNamer::add(const PackedGroup& group) {
  const Tensor& first = view_.catalog.tensors()[group.parts[0]];
  TargetTensor t;
  t.name = group.name;
  t.dtype = TRY(dtype_of(group));
  t.shape = first.joined_shape();
  if (group.stored && first.shape.rank() > 0) {
    std::vector<Dims> shapes;
    for (const std::size_t part : group.parts) shapes.push_back(view_.catalog.tensors()[part].joined_shape());
    const ModelConfig* const config = names_.model.config_or_null();
    t.shape = TRY(packed_shape(*group.stored, shapes, config).context(tensor_text(group.name)));
  }
  t.path = rename_path(first.path, view_.key(first.name), t.name);
  if (!names_.renames()) t.plain_key = first.plain_key;
  out_.uncut.push_back(is_uncut(view_, names_.model, first.name));
  out_.tensors.push_back(std::move(t));
  return {};
}

}  // namespace

Result<OutputTensors> name_tensors(const SourceView& view, const Translation& names, const DtypeOptions& typing,
                                   ConversionNotes& notes) {
  note_packed(view, names, typing, notes);
  OutputTensors out;
  const std::vector<std::size_t> taken = untied(view, names, out, notes);
  if (names.renames()) note_orphans(view, *names.model.family, taken, notes);
  TRY(check_have_names(view, names, taken));
  OutputNamer namer(view, names, typing, out);
  if (names.renames() && names.to != Convention::kHf) {
    const std::vector<PackedGroup> groups = TRY(pack(*names.model.family, *names.to, view.catalog, taken));
    out.tensors.reserve(groups.size());
    for (const PackedGroup& group : groups) TRY(namer.add(group));
  } else {
    out.tensors.reserve(taken.size());
    for (const std::size_t i : taken) TRY(namer.add(i));
  }
  namer.note(notes);
  return out;
}

namespace {

// Fails if the layout shards a tensor of a packed weight: its parts would not be packed weights.
Status check_uncut(const TargetTensor& tensor, const RankPlacement& on) {
  for (const Split& split : tensor.placement->splits)
    for (const std::string& axis : split.axes)
      if (on.mesh.size(axis) > 1)
        return unsupported("layout '" + printable(on.layout->name) + "' cuts " + tensor_text(tensor.name) + " along " +
                           axis + ": it is part of a packed weight, which must be whole on every rank");
  return {};
}

// Shares equal placements.
class Placements {
 public:
  SharedPlacement of(Placement placement) {
    const auto is_same = [&](const Placement& p) { return p == placement; };
    const auto same = std::find_if(known_.rbegin(), known_.rend(), is_same);
    return same != known_.rend() ? *same : known_.emplace_back(std::move(placement));
  }

 private:
  std::vector<SharedPlacement> known_;  // searched from the end, since recent ones recur
};

}  // namespace

Status place(OutputTensors& output, const SourceView& view, const Model& model, const RankPlacement& on,
             const Format& format, ConversionNotes& notes) {
  Placements placements;
  std::vector<TargetTensor>& tensors = output.tensors;
  if (on.layout) {
    Index layers = 0;
    for (const TargetTensor& t : tensors) layers = std::max(layers, layer_number(t.key()) + 1);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      TargetTensor& t = tensors[i];
      t.placement =
          placements.of(TRY(format.holds_local_tensors() ? on.layout->place(t.name, t.shape, layers)
                                                         : on.layout->place_in_files(t.name, t.shape, layers)));
      if (output.uncut[i]) TRY(check_uncut(t, on));
    }
    return {};
  }
  if (on.mesh.ranks() == 1) return {};  // nothing is sharded
  std::vector<Placer::Of> placed;
  placed.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TargetTensor& t = tensors[i];
    const auto from = model.family ? std::nullopt : view.catalog.find(t.name);
    placed.push_back(
        {t.key(), t.name, t.shape, from ? &view.catalog.tensors()[*from].fragments : nullptr, output.uncut[i]});
  }
  const ModelConfig* config = model.config_or_null();
  const Mesh mesh = format.shares_experts ? on.mesh.without("ep") : on.mesh;
  const Placer placer = TRY(Placer::make(mesh, model.family, config, placed, format.stage_rule));
  // Formats whose ranks load their own files were given whole heads by repeat_heads().
  const bool whole_heads = format.holds_local_tensors() && config &&
                           on.mesh.size("tp") % std::max<Index>(1, config->num_key_value_heads()) == 0;
  if (!placer.warning().empty() && !whole_heads) notes.warnings.push_back(placer.warning());
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].placement = placements.of(placer.place(placed[i]));
  return {};
}

Result<std::vector<TargetBlob>> name_blobs(Reader& source, const SourceView& view, const Translation& names,
                                           bool with_bytes) {
  std::vector<TargetBlob> out;
  std::unordered_map<std::string, std::size_t> by_name;
  const Model& model = names.model;
  std::vector<std::string> unwritable;
  std::string reason;
  for (const Blob& blob : view.catalog.blobs) {
    auto stored = source.blob_bytes(blob);
    if (!stored && with_bytes && stored.error().code() == ErrorCode::kUnsupported) {
      if (unwritable.empty()) reason = stored.error().message();
      unwritable.push_back(blob.name);
      continue;
    }
    if (!stored && (with_bytes || stored.error().code() == ErrorCode::kUsage)) return std::move(stored).error();
    std::string bytes = stored ? *std::move(stored) : std::string(blob.extent.length, '\0');
    std::vector<std::string> keys = {blob.name};
    if (names.renames()) keys = canonical_keys(*model.family, source.catalog(), model.config_or_null(), blob.key());
    for (const std::string& canonical : keys) {
      TargetBlob b{names.renames() ? rename_key(*model.family, canonical, *names.to) : canonical, {}, {}};
      b.path = rename_path(blob.path, names.renames() ? blob.key() : blob.name, b.name);
      const auto [there, is_new] = by_name.emplace(b.name, out.size());
      if (is_new) {
        b.bytes = &canonical == &keys.back() ? std::exchange(bytes, {}) : bytes;
        out.push_back(std::move(b));
      } else if (with_bytes && out[there->second].bytes != bytes) {
        return unsupported("object '" + printable(blob.name) + "' differs from another object that also becomes '" +
                           printable(b.name) + "' in the output");
      }
    }
  }
  if (unwritable.empty()) return out;
  const Index others = std::ssize(unwritable) - 1;
  std::vector<std::string> options;
  for (const std::string& pattern : fold_names(unwritable)) options.push_back("--exclude " + shell_word(pattern));
  return unsupported(reason +
                     (others > 0 ? (others > 1 ? ", as are " : ", as is ") + count_of(others, "other object") : "") +
                     "; to leave " + (others > 0 ? "them" : "it") + " out, add " + join(options, " "));
}

std::function<std::vector<std::string>(const std::string& name)> parameter_names(const Catalog& source,
                                                                                 const Translation& names) {
  if (!names.renames()) return nullptr;
  // Plain names of parameters, by the names that the optimizer uses.
  auto plain = std::make_shared<std::unordered_map<std::string, std::string>>();
  for (const Part& part : source.parts) {
    if (part.kind != StateKind::kOptimizer) continue;
    for (const Tensor& t : source.tensors()) {
      std::string_view rest = t.name;
      if (!take(rest, part.prefix) || !take(rest, "state.")) continue;
      const StateKey key = split_state_key(t.key());
      if (key.parameter.empty() || !rest.ends_with(key.suffix)) continue;
      plain->emplace(rest.substr(0, rest.size() - key.suffix.size()), key.parameter);
    }
  }
  return [plain, &source, &names](const std::string& name) {
    const Model& model = names.model;
    const auto known = plain->find(name);
    std::vector<std::string> out =
        canonical_keys(*model.family, source, model.config_or_null(), known == plain->end() ? name : known->second);
    for (std::string& key : out) key = rename_key(*model.family, key, *names.to);
    return out;
  };
}

std::optional<HeadCounts> head_counts(const Model& model) {
  if (!model.config) return std::nullopt;
  return HeadCounts{model.config->num_attention_heads(), model.config->num_key_value_heads()};
}

Result<Catalog> view_target(const Catalog& target, const Translation& names) {
  if (!names.renames()) return target;
  const Model& model = names.model;
  const ViewOptions how{model.family, model.config_or_null(), names.hf_rows, true, true, *names.to, model.convention};
  return canonical_view(target, how, nullptr);
}

// ---- files next to the output

namespace {

bool means_one(std::string_view pattern) { return pattern.find_first_of("*?[{") == std::string_view::npos; }

// Returns the files next to config.json that are neither read nor copied.
Result<OmittedState> what_stays(const Catalog& source, const std::vector<SideFile>& copied) {
  OmittedState out{"files next to the model", 0, 0, 0};
  std::set<std::string> known;
  for (const std::string_view own : {kConfigFile, kManifestFile, kAdapterConfigFile}) known.emplace(own);
  const auto add = [&](const std::string& name) { known.insert(name.substr(0, name.find('/'))); };
  for (const CatalogFile& file : source.files) add(file.path);
  for (const std::string& file : source.metadata_files) add(file);
  for (const SideFile& file : copied) add(file.name);
  for (const DirectoryEntry& entry : TRY(list_directory(source.root))) {
    if (entry.name.starts_with('.') || known.contains(entry.name)) continue;
    out.bytes += entry.size;
    out.names.push_back(entry.name + (entry.is_directory ? "/" : ""));
  }
  return out;
}

// Collects the files that are copied next to the output.
class SideFiles {
 public:
  SideFiles(const Format& format, ConversionNotes& notes) : notes_(notes) {
    for (const std::string_view pattern : format.side_files)
      if (means_one(pattern))
        names_.emplace_back(pattern);
      else
        patterns_.push_back(pattern);
  }
  // Adds the files with the format's names, each from the first place that has it.
  Status add_named(const std::vector<std::string>& places);
  // Adds the files of a directory that match the format's patterns. Python files are added only if config.json refers
  // to them.
  Status add_matching(const std::string& directory);
  // Adds the config.json of a directory.
  Status add_config(const std::string& directory);
  // Notes the files next to config.json that are neither read nor copied.
  Status note_what_stays(const Catalog& source);
  std::vector<SideFile> take() && { return std::move(files_); }

 private:
  Status add(const std::string& place, const std::string& name);

  ConversionNotes& notes_;
  std::vector<std::string> names_;
  std::vector<std::string_view> patterns_;
  std::vector<SideFile> files_;
  std::set<std::string> seen_;
};

Status SideFiles::add(const std::string& place, const std::string& name) {
  const std::string path = path_join(place, name);
  if (!seen_.insert(name).second) return {};
  if (const auto real = TRY(leads_out(path, place))) {
    notes_.warnings.push_back(path + " is a link out of the checkpoint, to " + printable(*real) + ": it is not copied");
    return {};
  }
  SideFile file{name, "", path};
  file.bytes = TRY(file.size());  // fails now if it cannot be opened, not after the weights are written
  if (file.bytes > kMaxSideFile)
    return unsupported(path + ": expected a side file of at most " + with_commas(kMaxSideFile) + " bytes, got " +
                       with_commas(file.bytes));
  files_.push_back(std::move(file));
  return {};
}

Status SideFiles::add_named(const std::vector<std::string>& places) {
  std::vector<std::string> asked;
  for (const std::string& name : names_)
    for (const std::string& place : places) asked.push_back(path_join(place, name));
  TRY(look_up_stored(asked));
  for (const std::string& name : names_)
    for (const std::string& place : places) {
      if (!TRY(path_exists(path_join(place, name)))) continue;
      TRY(add(place, name));
      break;
    }
  return {};
}

Status SideFiles::add_matching(const std::string& directory) {
  if (patterns_.empty() || !TRY(may_be_listed(directory))) return {};
  const std::set<std::string> code = TRY(model_code(directory));
  for (const std::string& name : TRY(files_like(directory, patterns_)))
    if (!name.ends_with(".py") || code.contains(name)) TRY(add(directory, name));
  return {};
}

Status SideFiles::add_config(const std::string& directory) {
  const std::size_t before = files_.size();
  TRY(add(directory, std::string(kConfigFile)));
  if (files_.size() > before)
    notes_.warnings.push_back(files_.back().path + " is copied unchanged, because it is next to a model");
  return {};
}

Status SideFiles::note_what_stays(const Catalog& source) {
  if (OmittedState stays = TRY(what_stays(source, files_)); !stays.names.empty())
    notes_.left_out.push_back(std::move(stays));
  return {};
}

}  // namespace

Result<std::vector<SideFile>> find_side_files(const Catalog& source, const std::string& config_path,
                                              const Format& format, ConversionNotes& notes) {
  std::vector<std::string> places = {source.root, parent_path(source.root)};
  if (!config_path.empty()) places.insert(places.begin(), parent_path(config_path));
  const bool is_models = TRY(path_exists(path_join(source.root, kConfigFile)));
  SideFiles files(format, notes);
  TRY(files.add_named(places));
  if (!config_path.empty() || is_models) TRY(files.add_matching(places.front()));
  if (!format.side_files.empty() && is_models) {
    if (config_path.empty() && source.has_model_names) TRY(files.add_config(source.root));
    TRY(files.note_what_stays(source));
  }
  return std::move(files).take();
}

// ---- for formats that refer to tensors in place

Result<Catalog> name_view(const SourceView& view, const Translation& names, const DtypeOptions& typing) {
  if (typing.dtype) return usage_error("--dtype: a view shows the stored values and cannot convert them");
  if (names.hf_rows && names.to != Convention::kHf)
    return unsupported("a view in the row order of " + std::string(info(*names.to).title) +
                       " is not supported; choose the stored order or Hugging Face's");
  std::vector<std::size_t> all(view.catalog.tensors().size());
  std::iota(all.begin(), all.end(), 0);
  if (names.renames())
    for (const PackedGroup& group : TRY(pack(*names.model.family, *names.to, view.catalog, all)))
      if (group.stored)
        return unsupported("a view under " + std::string(info(*names.to).title) + ": " + tensor_text(group.name) +
                           " would combine several tensors");
  Catalog out;
  out.root = view.catalog.root;
  out.files = view.catalog.files;
  for (Tensor tensor : view.catalog.tensors()) {
    tensor.name = names.target_name(tensor.name, view.key(tensor.name));
    TRY(out.add(std::move(tensor)));
  }
  return out;
}

}  // namespace reshard
