#include "lib/convert/conversion.h"

#include <algorithm>
#include <numeric>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/device/convert.h"
#include "lib/layout/stages.h"
#include "lib/model/packing.h"

namespace reshard {
namespace {

bool selects(const ConversionOptions& o, std::string_view name) {
  return (o.include.empty() || any_glob_matches(o.include, name)) && !any_glob_matches(o.exclude, name);
}

bool is_tied_head(const Family& family, std::string_view canonical) {
  const auto parsed = parse_name(family, canonical);
  return parsed && !parsed->rule->tied_to.empty();
}

}  // namespace

Result<std::unique_ptr<Conversion>> Conversion::prepare(Reader& source, const Format& format,
                                                        ConversionOptions options) {
  if (!format.lay_out && !format.write_view)
    return unsupported(std::string(format.title) + " can be read but not written");
  std::unique_ptr<Conversion> c(new Conversion(source, format, std::move(options)));
  TRY(c->choose_names());
  TRY(c->leave_out_faulty());
  TRY(c->select());
  TRY(c->make_views());
  TRY(format.write_view ? c->name_view() : c->lay_out());
  (void)c->tokenizer_paths(&c->warnings_);
  return c;
}

Status Conversion::choose_names() {
  std::string config_name = options_.config_path;
  if (!config_name.empty()) {
    config_text_ = TRY(read_whole_file(config_name, kMaxSideFile));
    const auto real = leads_out(config_name, parent_path(config_name));
    copies_config_ = options_.config_given || !real;
    if (!copies_config_)
      warnings_.push_back(config_name + " leads out of the checkpoint, to " + printable(*real) +
                          ": it is used, but not copied unless --config names it");
  } else if (auto kept = TRY(source_.side_file("config.json", kMaxSideFile))) {
    config_text_ = std::move(*kept);
    config_name = path_join(options_.source_path, "config.json");
  }
  std::optional<ModelConfig> config;
  if (!config_text_.empty() && !options_.model.is_none())
    config = TRY(ModelConfig::parse(TRY(parse_json(config_text_, config_name)), config_name).context(config_name));
  model_ = TRY(recognise(source_.catalog(), options_.model, std::move(config)));
  if (!model_.family) model_.config.reset();
  if (!model_.family || options_.keep_names) return {};
  target_convention_ = options_.convention;
  if (!target_convention_ && format_.hf_names) target_convention_ = Convention::kHf;
  if (!target_convention_) return {};
  if (!model_.family->has_convention(*target_convention_))
    return unsupported("family " + std::string(model_.family->name) + " has no " +
                       std::string(convention_title(*target_convention_)) + "; --names keep leaves them as they are");
  hf_rows_ = !same_row_order(*model_.family, model_.convention, *target_convention_);
  return {};
}

Status Conversion::leave_out_faulty() {
  const auto& tensors = source_.catalog().tensors();
  is_faulty_.assign(tensors.size(), false);
  if (!options_.allow.cover) return {};
  LeftOut out{"not stored exactly once (--allow cover)", 0, 0, 0, {}};
  for (const auto& [tensor, error] : tensor_faults(source_.catalog(), !options_.metadata_only)) {
    is_faulty_[tensor] = true;
    ++out.tensors;
    out.bytes += tensors[tensor].bytes();
    out.names.push_back(tensors[tensor].name);
  }
  if (out.tensors == 0) return {};
  complete_ = false;
  warnings_.push_back(count_of(out.tensors, "tensor") +
                      " not stored exactly once left out; reshard_manifest.json names them");
  left_out_.push_back(std::move(out));
  return {};
}

Status Conversion::select() {
  const bool model_only = format_.holds == Holds::kModel;
  LeftOut optimizer{"optimizer", 0, 0, 0}, other{"training state", 0, 0, 0}, excluded{"excluded", 0, 0, 0};
  std::vector<std::size_t> chosen;
  const auto& tensors = source_.catalog().tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (is_faulty_[i]) continue;
    const StateKind kind = split_state_key(tensors[i].name).kind;
    LeftOut* out = nullptr;
    if (model_only && kind != StateKind::kModel) out = kind == StateKind::kOptimizer ? &optimizer : &other;
    if (!out && !selects(options_, tensors[i].name)) {
      out = &excluded;
      complete_ = false;
    }
    if (!out) {
      chosen.push_back(i);
      continue;
    }
    ++out->tensors;
    out->bytes += tensors[i].bytes();
  }
  for (const Blob& blob : source_.catalog().blobs) {
    LeftOut* out = nullptr;
    if (format_.holds != Holds::kEverything)
      out = split_state_key(blob.name).kind == StateKind::kOptimizer ? &optimizer : &other;
    if (!out && !selects(options_, blob.name)) out = &excluded;
    if (!out) {
      selected_.blobs.push_back(blob);
      continue;
    }
    ++out->objects;
    out->bytes += blob.extent.length;
  }
  for (LeftOut* out : {&optimizer, &other, &excluded})
    if (out->tensors + out->objects > 0) left_out_.push_back(std::move(*out));
  if (chosen.empty()) return usage_error(source_.catalog().root + ": no tensor is left to convert");

  if (!options_.metadata_only) TRY(source_.locate(chosen, options_.run.threads, options_.spool));
  selected_.root = source_.catalog().root;
  selected_.files = source_.catalog().files;
  for (const std::size_t i : chosen) TRY(selected_.add(tensors[i]));
  // What metadata promised was checked when it was read; now the payloads' own headers have spoken.
  if (!options_.metadata_only) TRY(validate(selected_));
  return {};
}

Status Conversion::make_views() {
  for (const Tensor& t : selected_.tensors())
    natives_.emplace(renames() ? canonical_key(*model_.family, t.name) : t.name, t.name);
  if (!renames()) {
    source_view_ = selected_;
    return {};
  }
  std::vector<std::string> dropped;
  const ViewOptions view{model_.family, model_.config_or_null(), hf_rows_, options_.keep_unknown};
  source_view_ = TRY(canonical_view(selected_, view, &dropped));
  if (!dropped.empty()) {
    LeftOut out{"derived tensors (" + dropped.front() + (dropped.size() > 1 ? ", ..." : "") + ")", 0, 0, 0};
    for (const std::string& name : dropped) {
      ++out.tensors;
      out.bytes += selected_.tensors()[*selected_.find(name)].bytes();
    }
    left_out_.push_back(std::move(out));
  }
  TRY(fit());
  for (const Tensor& t : source_view_.tensors()) TRY(check_cover(t));
  return check_config();
}

Status Conversion::fit() {
  if (!model_.config) {
    if (options_.repairs.vocabulary || options_.repairs.experts)
      return usage_error("--repair needs to know what the model should be; give its config.json with --config");
    return {};
  }
  FitOptions fit{model_.family,          &*model_.config, options_.repairs, options_.donor,
                 options_.metadata_only, options_.spool,  options_.run};
  fit.run.progress = nullptr;
  auto fitted = fit_to_config(source_view_, source_.files(), fit);
  if (!fitted) {
    if (!options_.allow.config) return std::move(fitted).error();
    warnings_.push_back(fitted.error().message());
    return {};
  }
  for (std::string& note : fitted->notes) warnings_.push_back(std::move(note));
  repairs_ = std::move(fitted->repairs);
  return {};
}

Status Conversion::check_config() {
  if (!model_.config) return {};
  const Status fits = check_against_config(source_view_, *model_.family, *model_.config, complete_);
  if (fits) return {};
  const Error& error = fits.error();
  if (!options_.allow.config)
    return Error(error.code(), error.message() + "; reshard verify explains it, --allow config writes what is there");
  warnings_.push_back(error.message());
  return {};
}

std::string Conversion::target_name(const std::string& canonical) const {
  const auto native = natives_.find(canonical);
  if (!renames() || (model_.convention == Convention::kHf && target_convention_ == Convention::kHf))
    return native == natives_.end() ? canonical : native->second;
  return rename_key(*model_.family, canonical, *target_convention_);
}

// Parameters that a family keeps in a dtype of their own stay in it; quantised ones mean nothing without their scales.
Result<DType> Conversion::target_dtype(const Tensor& tensor, const std::string& native) const {
  const DType as = options_.dtype.value_or(tensor.dtype);
  if (as == tensor.dtype || split_state_key(tensor.name).kind != StateKind::kModel || !can_convert(tensor.dtype, as) ||
      any_glob_matches(options_.keep_dtype, native) || any_glob_matches(options_.keep_dtype, tensor.name))
    return tensor.dtype;
  const auto parsed = model_.family ? parse_name(*model_.family, tensor.name) : std::nullopt;
  if (parsed && (parsed->is_scale || !parsed->rule->dtype.empty())) return tensor.dtype;
  if (parsed && parsed->rule->quantized && byte_size(tensor.dtype) == 1)
    return unsupported("tensor '" + printable(native) + "' is " + std::string(info(tensor.dtype).torch_name) +
                       " with scales in a tensor of its own, which --dtype does not apply; --keep-dtype '" +
                       printable(native) + "' leaves it as it is");
  return as;
}

Result<LayoutRequest> Conversion::layout_request() {
  LayoutRequest request;
  request.mesh = options_.mesh;
  request.layout = options_.layout;
  request.max_file_bytes = options_.max_file_bytes;
  request.compression = options_.compression;
  request.container = options_.container;
  request.rank = options_.rank;
  if (model_.config) request.heads = {model_.config->num_attention_heads(), model_.config->num_key_value_heads()};
  TRY(pad_vocabulary());
  TRY(repeat_heads());
  request.tensors = TRY(target_tensors());
  TRY(place(request.tensors));
  placed_ = request.tensors;
  request.blobs = TRY(target_blobs());
  return request;
}

// The tensors of the output, in the order of the source's view.
Result<std::vector<TargetTensor>> Conversion::target_tensors() {
  std::vector<std::size_t> taken;
  const bool ties =
      renames() && *target_convention_ == Convention::kHf && model_.config && model_.config->tie_word_embeddings();
  for (std::size_t i = 0; i < source_view_.tensors().size(); ++i) {
    const Tensor& tensor = source_view_.tensors()[i];
    if (!ties || !is_tied_head(*model_.family, tensor.name)) {
      taken.push_back(i);
      continue;
    }
    if (!natives_.contains(tensor.name)) continue;
    left_out_.push_back({"output head, tied to the embedding", 1, 0, tensor.bytes()});
    if (const auto embedding = source_view_.find(parse_name(*model_.family, tensor.name)->rule->tied_to))
      equal_tensors_.push_back({*embedding, i,
                                model_.config->path +
                                    " says tie_word_embeddings, but the stored head differs from the " +
                                    "embedding: writing only one of them would lose the other. Set " +
                                    "tie_word_embeddings to false to keep both"});
  }
  std::vector<PackedGroup> groups;
  if (renames() && target_convention_ != Convention::kHf)
    groups = TRY(pack(*model_.family, *target_convention_, source_view_, taken));
  else
    for (const std::size_t i : taken) groups.push_back({target_name(source_view_.tensors()[i].name), nullptr, {i}});
  std::vector<TargetTensor> out;
  for (const PackedGroup& group : groups) {
    std::vector<Dims> shapes;
    std::optional<DType> dtype;
    TargetTensor t;
    t.name = group.name;
    for (const std::size_t part : group.parts) {
      const Tensor& tensor = source_view_.tensors()[part];
      const auto native = natives_.find(tensor.name);
      const DType as = TRY(target_dtype(tensor, native == natives_.end() ? tensor.name : native->second));
      if (dtype && *dtype != as)
        return unsupported("tensor '" + printable(group.name) + "' of the output is made of tensors of " +
                           std::string(info(*dtype).torch_name) + " and " + std::string(info(as).torch_name));
      dtype = as;
      if (as != tensor.dtype) ++converted_;
      shapes.push_back(tensor.shape);
      if (shapes.size() > 1 && tensor.shape.rank() == 0)
        equal_tensors_.push_back({group.parts[0], part,
                                  "tensor '" + printable(tensor.name) + "' differs from '" +
                                      printable(source_view_.tensors()[group.parts[0]].name) + "', and the output's '" +
                                      printable(group.name) + "' stands for both"});
    }
    const Tensor& first = source_view_.tensors()[group.parts[0]];
    t.dtype = *dtype;
    t.shape = first.shape;
    if (group.stored && first.shape.rank() > 0) {
      auto shape = packed_shape(*group.stored, shapes);
      if (!shape) return std::move(shape).error().context("tensor '" + printable(group.name) + "'");
      t.shape = *shape;
    }
    const auto native = natives_.find(first.name);
    t.path = rename_path(first.path, native == natives_.end() ? first.name : native->second, t.name);
    out.push_back(std::move(t));
  }
  return out;
}

// Objects of an optimizer are named after parameters: where those are split the object is repeated, and where several
// become one their objects must be equal.
Result<std::vector<TargetBlob>> Conversion::target_blobs() {
  std::vector<TargetBlob> out;
  std::unordered_map<std::string, std::size_t> by_name;
  for (const Blob& blob : selected_.blobs) {
    const std::string bytes = options_.metadata_only ? std::string(static_cast<std::size_t>(blob.extent.length), '\0')
                                                     : TRY(source_.blob_bytes(blob));
    std::vector<std::string> names = {blob.name};
    if (renames()) names = canonical_keys(*model_.family, selected_, model_.config_or_null(), blob.name);
    for (const std::string& canonical : names) {
      TargetBlob b{renames() ? rename_key(*model_.family, canonical, *target_convention_) : canonical, {}, bytes};
      b.path = rename_path(blob.path, blob.name, b.name);
      const auto [there, is_new] = by_name.emplace(b.name, out.size());
      if (is_new)
        out.push_back(std::move(b));
      else if (out[there->second].bytes != bytes && !options_.metadata_only)
        return unsupported("object '" + printable(blob.name) + "' differs from another that becomes '" +
                           printable(b.name) + "' of the output too");
    }
  }
  return out;
}

// `rows` as --vocab-divisible-by has them.
Result<Index> Conversion::padded_to_multiple(Index rows) const {
  const auto unit = checked_mul(options_.vocab_divisible_by, options_.mesh.size("tp"));
  const auto padded = unit ? checked_round_up(rows, *unit) : std::nullopt;
  if (!padded) return usage_error("--vocab-divisible-by: " + with_commas(rows) + " rows are too many to pad");
  return *padded;
}

// Gives the vocabulary the rows that the target framework has.
Status Conversion::pad_vocabulary() {
  const auto* vocabulary = options_.layout && options_.layout->vocabulary ? &*options_.layout->vocabulary : nullptr;
  const bool follows =
      format_.holds_local_tensors() || !options_.layout || options_.layout->stored_as == StoredAs::kShards;
  const bool by_layout = vocabulary && follows && (vocabulary->divisible_by || vocabulary->padded_size);
  if (!by_layout && options_.vocab_divisible_by == 0) {
    if (options_.vocab_padding)
      return usage_error(
          "--vocab-padding says what rows beyond the vocabulary hold, and nothing says how many there "
          "are to be; --vocab-divisible-by or a layout does");
    return {};
  }
  auto padding = options_.vocab_padding;
  if (!padding && by_layout && vocabulary->padding == Padding::kZero) padding = VocabularyFill::kZero;
  std::vector<std::string> padded;
  Index rows = 0;
  FitOptions fit;
  fit.metadata_only = options_.metadata_only;
  fit.spool = options_.spool;
  for (std::size_t i = 0; i < source_view_.tensors().size(); ++i) {
    const Tensor& t = source_view_.tensors()[i];
    const StateKey key = split_state_key(t.name);
    if (key.parameter.empty() || t.shape.rank() == 0) continue;
    const auto parsed = model_.family ? parse_name(*model_.family, key.parameter) : std::nullopt;
    if (by_layout ? !any_glob_matches(vocabulary->tensors, target_name(t.name))
                  : !parsed || !parsed->rule->is_vocabulary())
      continue;
    const Index wanted = TRY(by_layout ? options_.layout->padded_rows(t.shape[0]) : padded_to_multiple(t.shape[0]));
    if (wanted <= t.shape[0]) continue;  // the layout says what is wrong with fewer
    if (!padding)
      return usage_error("tensor '" + printable(target_name(t.name)) + "' has " + with_commas(t.shape[0]) +
                         " rows, the target's vocabulary " + with_commas(wanted) +
                         "; --vocab-padding zero, repeat-last or mean says what the others are to be");
    rows = wanted - t.shape[0];
    padded.push_back(target_name(t.name));
    TRY(pad_rows(source_view_, i, wanted, *padding, source_.files(), fit));
  }
  if (padded.empty()) return {};
  warnings_.push_back(with_commas(rows) + " rows (" + std::string(vocabulary_fill_name(*padding)) +
                      ") are added to the vocabulary of " + printable(padded.front()) +
                      (padded.size() > 1 ? " and " + count_of(std::ssize(padded) - 1, "other") : "") + ".");
  Json names = Json::array();
  for (const std::string& name : padded) names.push_back(name);
  Json record = Json::object();
  record.set("what", "vocabulary padded")
      .set("padding", vocabulary_fill_name(*padding))
      .set("rows", rows)
      .set("tensors", std::move(names));
  repairs_.push_back(std::move(record));
  return {};
}

// How many ranks are to hold each key-value head: as the layout says, or in files that ranks load as they are, as many
// as share one.
Index Conversion::head_copies() const {
  if (options_.layout) return options_.layout->kv_heads ? options_.layout->kv_heads->replication : 1;
  const Index tp = options_.mesh.size("tp"), heads = model_.config ? model_.config->num_key_value_heads() : 0;
  return format_.holds_local_tensors() && heads > 0 && tp > heads && tp % heads == 0 ? tp / heads : 1;
}

// Gives every tensor-parallel rank the key-value head it computes with, where several share one.
Status Conversion::repeat_heads() {
  const Index copies = head_copies();
  if (copies == 1) return {};
  if (!model_.config)
    return usage_error("layout '" + printable(options_.layout->name) +
                       "' repeats key-value heads, and no config.json " +
                       "says how many there are; give one with --config");
  const Index heads = model_.config->num_key_value_heads();
  Index repeated = 0;
  for (std::size_t i = 0; i < source_view_.tensors().size(); ++i) {
    Tensor& t = source_view_.tensor(i);
    const StateKey key = split_state_key(t.name);
    const auto parsed = key.parameter.empty() ? std::nullopt : parse_name(*model_.family, key.parameter);
    const bool is_heads = parsed && !parsed->is_packed() && !parsed->is_scale &&
                          parsed->rule->heads == "num_key_value_heads" && parsed->rule->tp_dim == 0;
    const bool wanted =
        options_.layout ? any_glob_matches(options_.layout->kv_heads->tensors, target_name(t.name)) : is_heads;
    if (!wanted || t.shape.rank() == 0) continue;
    if (!is_heads || t.shape[0] % heads != 0)
      return unsupported("tensor '" + printable(t.name) + "' " + to_string(t.shape) + ": the layout repeats its " +
                         "key-value heads, and it is not made of " + with_commas(heads));
    repeat_blocks(t, t.shape[0] / heads, copies);
    ++repeated;
  }
  if (repeated > 0)
    warnings_.push_back("Each key-value head is held by " + with_commas(copies) + " ranks: " +
                        count_of(repeated, "tensor") + " become " + with_commas(copies) + " times as long.");
  return {};
}

Status Conversion::place(std::vector<TargetTensor>& tensors) {
  if (options_.layout) {
    Index layers = 0;
    for (const TargetTensor& t : tensors) layers = std::max(layers, layer_number(t.name) + 1);
    for (TargetTensor& t : tensors)
      t.placement = TRY(format_.holds_local_tensors() ? options_.layout->place(t.name, t.shape, layers)
                                                      : options_.layout->place_in_files(t.name, t.shape, layers));
    return {};
  }
  Catalog model;
  for (const TargetTensor& t : tensors) {
    Tensor tensor;
    tensor.name = t.name;
    tensor.shape = t.shape;
    if (const auto from = source_view_.find(t.name); from && !model_.family)
      tensor.fragments = source_view_.tensors()[*from].fragments;
    TRY(model.add(std::move(tensor)));
  }
  const Placer placer =
      TRY(Placer::make(options_.mesh, model_.family, model_.config_or_null(), model, format_.stage_rule));
  // Ranks that load their files as they are have been given whole heads, as far as that goes.
  const bool whole_heads = format_.holds_local_tensors() && model_.config &&
                           options_.mesh.size("tp") % std::max<Index>(1, model_.config->num_key_value_heads()) == 0;
  if (!placer.warning().empty() && !whole_heads) warnings_.push_back(placer.warning());
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].placement = placer.place(model.tensors()[i]);
  return {};
}

Status Conversion::lay_out() {
  target_ = TRY(format_.lay_out(TRY(layout_request())));
  if (renames()) {
    const ViewOptions view{model_.family, model_.config_or_null(), hf_rows_, true, true};
    target_view_ = TRY(canonical_view(target_->catalog(), view, nullptr));
  } else {
    target_view_ = target_->catalog();
  }
  plan_ = TRY(make_plan(source_view_, target_view_));
  options_.run.worker_bytes = target_->worker_bytes();
  return {};
}

// The source's view under the output's names. Its rows are where they are: in Hugging Face's order, or as stored.
Status Conversion::name_view() {
  if (options_.dtype) return usage_error("--dtype: a view shows what is stored");
  if (hf_rows_ && target_convention_ != Convention::kHf)
    return unsupported("a view in the row order of " + std::string(convention_title(*target_convention_)) +
                       "; there are views in the stored order and in Hugging Face's");
  std::vector<std::size_t> all(source_view_.tensors().size());
  std::iota(all.begin(), all.end(), 0);
  if (renames())
    for (const PackedGroup& group : TRY(pack(*model_.family, *target_convention_, source_view_, all)))
      if (group.stored)
        return unsupported("a view under " + std::string(convention_title(*target_convention_)) + ": tensor '" +
                           printable(group.name) + "' would be made of several");
  target_view_.root = source_view_.root;
  target_view_.files = source_view_.files;
  for (Tensor tensor : source_view_.tensors()) {
    tensor.name = target_name(tensor.name);
    TRY(target_view_.add(std::move(tensor)));
  }
  return {};
}

Result<ViewReport> Conversion::write_view(const std::string& destination, bool replace) const {
  return format_.write_view(target_view_, destination, replace);
}

Index Conversion::disk_needed() const {
  Index sum = 0;
  for (const CatalogFile& f : target_->catalog().files) sum += f.size;
  return sum;
}

Result<MemoryPlan> Conversion::memory() const { return copy_memory(plan_, source_view_, target_view_, options_.run); }

std::vector<Index> Conversion::bytes_of_ranks() const {
  std::vector<Index> out(static_cast<std::size_t>(options_.mesh.ranks()));
  std::vector<std::pair<const TargetTensor*, std::vector<Index>>> known;  // elements, of tensors that lie alike
  for (const TargetTensor& t : placed_) {
    auto it = std::find_if(known.begin(), known.end(), [&](const auto& k) {
      return k.first->shape == t.shape && k.first->placement == t.placement;
    });
    if (it == known.end()) {
      it = known.insert(it, {&t, {}});
      for (Index rank = 0; rank < std::ssize(out); ++rank) {
        Index elements = 0;
        for (const LocalBox& b : owned_boxes(options_.mesh, t.placement, t.shape, rank)) elements += volume(b.box);
        it->second.push_back(elements);
      }
    }
    for (std::size_t rank = 0; rank < out.size(); ++rank) out[rank] += it->second[rank] * byte_size(t.dtype);
  }
  return out;
}

}  // namespace reshard
