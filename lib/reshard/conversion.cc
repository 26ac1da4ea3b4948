#include "lib/reshard/conversion.h"

#include <algorithm>
#include <array>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/device/convert.h"

namespace reshard {
namespace {

// Files beside a model that its loaders want (transformers; sentencepiece).
constexpr std::array<std::string_view, 13> kTokenizerFiles = {"generation_config.json",
                                                              "tokenizer.json",
                                                              "tokenizer.model",
                                                              "tokenizer_config.json",
                                                              "special_tokens_map.json",
                                                              "added_tokens.json",
                                                              "vocab.json",
                                                              "vocab.txt",
                                                              "merges.txt",
                                                              "chat_template.jinja",
                                                              "chat_template.json",
                                                              "preprocessor_config.json",
                                                              "original_config.json"};
constexpr Index kMaxSideFile = Index{256} << 20;

bool selects(const ConversionOptions& o, std::string_view name) {
  return (o.include.empty() || any_glob_matches(o.include, name)) && !any_glob_matches(o.exclude, name);
}

// The original tensor names behind a view's: the plan works under canonical names, files are named by native ones.
std::unordered_map<std::string, std::string> native_names(const Catalog& native, const Family* family) {
  std::unordered_map<std::string, std::string> out;
  for (const Tensor& t : native.tensors()) out.emplace(family ? canonical_key(*family, t.name) : t.name, t.name);
  return out;
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
  return c;
}

Status Conversion::choose_names() {
  std::string config_name = options_.config_path;
  if (!config_name.empty()) {
    config_text_ = TRY(read_whole_file(config_name, kMaxSideFile));
  } else if (auto kept = TRY(source_.side_file("config.json", kMaxSideFile))) {
    config_text_ = std::move(*kept);
    config_name = path_join(options_.source_path, "config.json");
  }
  if (!config_text_.empty() && (options_.detect_family || options_.family))
    config_ = TRY(ModelConfig::parse(TRY(parse_json(config_text_, config_name)), config_name).context(config_name));
  TRY(choose_family());
  if (!family_) config_.reset();
  if (!family_ || options_.keep_names) return {};
  target_names_ = options_.names;
  if (!target_names_ && format_.name == "hf") target_names_ = Names::kHf;
  if (!target_names_) return {};
  if (!family_->has_names(*target_names_))
    return unsupported("family " + std::string(family_->name) + " has no " + std::string(names_title(*target_names_)) +
                       "; --names keep leaves them as they are");
  hf_rows_ = !same_row_order(*source_names_, *target_names_);
  return {};
}

Status Conversion::choose_family() {
  const Catalog& catalog = source_.catalog();
  const Family* of_config = config_ ? family_of_model_type(config_->model_type) : nullptr;
  if (options_.detect_family) {
    // Another model whose names look alike: what a config says wins over what names suggest.
    if (config_ && !of_config) return {};
    if (const auto detected = detect_family(catalog, config_ ? &*config_ : nullptr);
        detected && (!of_config || of_config == detected->family)) {
      family_ = detected->family;
      source_names_ = detected->names;
    }
    return {};
  }
  if (!options_.family) return {};
  family_ = options_.family;
  source_names_ = detect_names(*family_, catalog);
  if (!source_names_)
    return unsupported(catalog.root + ": no tensor is named as in family " + std::string(family_->name));
  if (config_ && of_config != family_)
    return usage_error(options_.config_path + ": expected a model of family " + std::string(family_->name) +
                       ", got model_type '" + printable(config_->model_type) + "'");
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
  const bool model_only = format_.name == "hf";
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
    if (model_only) out = split_state_key(blob.name).kind == StateKind::kOptimizer ? &optimizer : &other;
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
  if (!renames()) {
    source_view_ = selected_;
    return {};
  }
  std::vector<std::string> dropped;
  const ViewOptions view{family_, config_ ? &*config_ : nullptr, hf_rows_, options_.keep_unknown};
  source_view_ = TRY(canonical_view(selected_, view, &dropped));
  if (!dropped.empty()) {
    LeftOut out{"derived tensors (" + dropped.front() + (dropped.size() > 1 ? ", ..." : "") + ")", 0, 0, 0};
    for (const std::string& name : dropped) {
      ++out.tensors;
      out.bytes += selected_.tensors()[*selected_.find(name)].bytes();
    }
    left_out_.push_back(std::move(out));
  }
  for (const Tensor& t : source_view_.tensors()) TRY(check_cover(t));
  return check_config();
}

Status Conversion::check_config() {
  if (!config_) return {};
  const Status fits = check_against_config(source_view_, *family_, *config_, complete_);
  if (fits) return {};
  const Error& error = fits.error();
  if (!options_.allow.config)
    return Error(error.code(), error.message() + "; reshard verify explains it, --allow config writes what is there");
  warnings_.push_back(error.message());
  return {};
}

std::string Conversion::target_name(const std::string& canonical, const std::string& native) const {
  if (!renames() || (source_names_ == Names::kHf && target_names_ == Names::kHf)) return native;
  return rename_key(*family_, canonical, *target_names_);
}

// Parameters that a family keeps in a dtype of their own stay in it; quantised ones mean nothing without their scales.
Result<DType> Conversion::target_dtype(const Tensor& tensor, const std::string& native) const {
  const DType as = options_.dtype.value_or(tensor.dtype);
  if (as == tensor.dtype || split_state_key(tensor.name).kind != StateKind::kModel || !can_convert(tensor.dtype, as) ||
      any_glob_matches(options_.keep_dtype, native))
    return tensor.dtype;
  const auto parsed = family_ ? parse_name(*family_, tensor.name) : std::nullopt;
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
  request.max_file_bytes = options_.max_file_bytes;
  request.compression = options_.compression;
  const auto natives = native_names(selected_, renames() ? family_ : nullptr);
  const bool ties = renames() && *target_names_ == Names::kHf && config_ && config_->tie_word_embeddings();
  std::vector<const Tensor*> sources;  // of each tensor of the request
  for (const Tensor& tensor : source_view_.tensors()) {
    if (ties && is_tied_head(*family_, tensor.name)) {
      if (natives.contains(tensor.name)) dropped_head_ = tensor.name;
      if (!dropped_head_.empty()) left_out_.push_back({"output head, tied to the embedding", 1, 0, tensor.bytes()});
      continue;
    }
    const auto found = natives.find(tensor.name);
    const std::string native = found == natives.end() ? tensor.name : found->second;
    TargetTensor t;
    t.name = target_name(tensor.name, native);
    t.dtype = TRY(target_dtype(tensor, native));
    if (t.dtype != tensor.dtype) ++converted_;
    t.shape = tensor.shape;
    t.path = rename_path(tensor.path, native, t.name);
    request.tensors.push_back(std::move(t));
    sources.push_back(&tensor);
  }
  TRY(place(request.tensors, sources));
  for (const Blob& blob : selected_.blobs) {
    TargetBlob b;
    b.name = renames() ? rename_key(*family_, blob.name, *target_names_) : blob.name;
    b.path = rename_path(blob.path, blob.name, b.name);
    b.bytes = options_.metadata_only ? std::string(static_cast<std::size_t>(blob.extent.length), '\0')
                                     : TRY(source_.blob_bytes(blob));
    request.blobs.push_back(std::move(b));
  }
  return request;
}

Status Conversion::place(std::vector<TargetTensor>& tensors, const std::vector<const Tensor*>& sources) {
  if (options_.layout) {
    Index layers = 0;
    for (const TargetTensor& t : tensors) layers = std::max(layers, layer_number(t.name) + 1);
    for (TargetTensor& t : tensors) t.placement = TRY(options_.layout->place_in_files(t.name, t.shape, layers));
    return {};
  }
  const Placer placer = TRY(Placer::make(options_.mesh, family_, config_ ? &*config_ : nullptr, source_view_));
  if (!placer.warning().empty()) warnings_.push_back(placer.warning());
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].placement = placer.place(*sources[i]);
  return {};
}

Status Conversion::lay_out() {
  target_ = TRY(format_.lay_out(TRY(layout_request())));
  if (renames()) {
    ViewOptions view{family_, config_ ? &*config_ : nullptr, hf_rows_, true};
    ModelConfig untied;  // the target holds what it holds: no head is added to it
    if (config_) {
      untied = *config_;
      untied.set("tie_word_embeddings", 0);
      view.config = &untied;
    }
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
  if (hf_rows_ && target_names_ != Names::kHf)
    return unsupported("a view in the row order of " + std::string(names_title(*target_names_)) +
                       "; there are views in the stored order and in Hugging Face's");
  const auto natives = native_names(selected_, renames() ? family_ : nullptr);
  target_view_.root = source_view_.root;
  target_view_.files = source_.catalog().files;  // locating may have added some
  for (Tensor tensor : source_view_.tensors()) {
    const auto found = natives.find(tensor.name);
    tensor.name = target_name(tensor.name, found == natives.end() ? tensor.name : found->second);
    TRY(target_view_.add(std::move(tensor)));
  }
  return {};
}

Result<ViewReport> Conversion::write_view(const std::string& destination) const {
  return format_.write_view(target_view_, destination);
}

Index Conversion::disk_needed() const {
  Index sum = 0;
  for (const CatalogFile& f : target_->catalog().files) sum += f.size;
  return sum;
}

Result<MemoryPlan> Conversion::memory() const { return copy_memory(plan_, source_view_, target_view_, options_.run); }

Status Conversion::check_tied_head(TensorSource& source) {
  if (dropped_head_.empty()) return {};
  const NameRule& rule = *parse_name(*family_, dropped_head_)->rule;
  const auto head = source_view_.find(rule.hf), embedding = source_view_.find(rule.tied_to);
  if (!head || !embedding) return {};
  const DType as = source_view_.tensors()[*embedding].dtype;
  RunOptions quiet = options_.run;
  quiet.progress = nullptr;
  const auto proofs = TRY(digest_tensors({{*head, as}, {*embedding, as}}, source, quiet));
  if (proofs[0].target == proofs[1].target) return {};
  return corrupt(selected_.root + ": " + config_->path +
                 " says tie_word_embeddings, but the stored head differs from the embedding: writing only one of them "
                 "would lose the other. Set tie_word_embeddings to false to keep both");
}

Result<Conversion::Outcome> Conversion::run(const std::string& destination, bool replace) {
  FileSource source(source_view_, source_.files());
  TRY(check_tied_head(source));
  auto output = TRY(Output::create(destination, *target_, replace));
  const auto proofs = TRY(copy_tensors(plan_, source, target_view_, *output, options_.run));
  Outcome outcome;
  outcome.removed_leftover = output->removed_leftover();
  outcome.checksums = source.checksums_checked();
  outcome.files_copied = TRY(add_side_files(*output));
  TRY(output->add_file("reshard_manifest.json", manifest(proofs)));
  TRY(output->commit());
  return outcome;
}

// config.json and the tokenizer, from beside the config or the source.
Result<std::vector<std::string>> Conversion::add_side_files(Output& output) const {
  std::vector<std::string> copied;
  const std::string& config_path = options_.config_path;
  if (!config_text_.empty()) {
    std::string text = config_text_;
    if (converted_ > 0) {
      Json json = TRY(parse_json(text, "config.json"));
      json.set(json.contains("dtype") ? "dtype" : "torch_dtype", Json(info(*options_.dtype).torch_name));
      text = to_text(json, 2) + "\n";
    }
    TRY(output.add_file("config.json", text));
    copied.emplace_back("config.json");
  }
  if (format_.name != "hf") return copied;
  std::vector<std::string> places = {selected_.root, parent_path(selected_.root)};
  if (!config_path.empty()) places.insert(places.begin(), parent_path(config_path));
  for (const std::string_view name : kTokenizerFiles) {
    for (const std::string& place : places) {
      const std::string path = path_join(place, name);
      if (!path_exists(path)) continue;
      TRY(output.add_file(std::string(name), TRY(read_whole_file(path, kMaxSideFile))));
      copied.emplace_back(name);
      break;
    }
  }
  return copied;
}

std::string Conversion::manifest(const std::vector<TensorProof>& proofs) const {
  Json tensors = Json::object();
  for (std::size_t i = 0; i < plan_.tensors.size(); ++i) {
    const Tensor& from = source_view_.tensors()[plan_.tensors[i].from];
    const Tensor& to = target_view_.tensors()[plan_.tensors[i].to];
    Json shape = Json::array();
    for (const Index extent : to.shape) shape.push_back(extent);
    Json entry = Json::object();
    entry.set("dtype", info(to.dtype).torch_name).set("shape", std::move(shape)).set("digest", proofs[i].target.hex());
    if (from.dtype != to.dtype)
      entry.set("source_dtype", info(from.dtype).torch_name).set("source_digest", proofs[i].source.hex());
    tensors.set(to.name, std::move(entry));
  }
  Json left_out = Json::array();
  for (const LeftOut& l : left_out_) {
    Json entry = Json::object();
    entry.set("what", l.what).set("tensors", l.tensors).set("objects", l.objects).set("bytes", l.bytes);
    Json names = Json::array();
    for (const std::string& name : l.names) names.push_back(name);
    if (!l.names.empty()) entry.set("names", std::move(names));
    left_out.push_back(std::move(entry));
  }
  Json globs = Json::object();
  for (const auto& [key, list] : {std::pair("include", &options_.include), std::pair("exclude", &options_.exclude),
                                  std::pair("keep_dtype", &options_.keep_dtype)}) {
    Json items = Json::array();
    for (const std::string& glob : *list) items.push_back(glob);
    globs.set(key, std::move(items));
  }
  Json options = Json::object();
  options.set("to", format_.name)
      .set("mesh", options_.mesh.to_string())
      .set("layout", options_.layout ? Json(options_.layout->name) : Json())
      .set("dtype", options_.dtype ? info(*options_.dtype).torch_name : "keep")
      .set("names", target_names_ ? names_title(*target_names_) : "as in the source")
      .set("filters", std::move(globs));
  Json manifest = Json::object();
  manifest.set("reshard", RESHARD_VERSION)
      .set("source", options_.source_path)
      .set("options", std::move(options))
      .set("family", family_ && renames() ? Json(family_->name) : Json())
      .set("hf_rows", hf_rows_)
      .set("left_out", std::move(left_out))
      .set("tensors", std::move(tensors));
  return to_text(manifest, 1) + "\n";
}

}  // namespace reshard
