#include "lib/audit/verification.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "lib/audit/comparison.h"
#include "lib/audit/duplicates.h"
#include "lib/audit/mesh_audit.h"
#include "lib/audit/model_audit.h"
#include "lib/audit/names_audit.h"
#include "lib/audit/replicas.h"
#include "lib/audit/structure_audit.h"
#include "lib/audit/tokenizer.h"
#include "lib/audit/vocabulary.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/device/convert.h"
#include "lib/model/parts.h"
#include "lib/model/placement.h"
#include "lib/model/unknown_family.h"
#include "lib/model/view.h"

namespace reshard {
namespace {

// ---- what the steps add to the report

void checked(VerifyReport& report, std::string id, std::string title, Index looked_at) {
  report.checks.push_back({std::move(id), std::move(title), looked_at, ""});
}

void skipped(VerifyReport& report, std::string id, std::string title, std::string why) {
  report.checks.push_back({std::move(id), std::move(title), 0, std::move(why)});
}

void fact(VerifyReport& report, std::string label, std::string text) {
  report.facts.emplace_back(std::move(label), std::move(text));
}

// The reference is good until the next finding.
Finding& add(VerifyReport& report, Severity severity, std::string id, std::string what) {
  return report.findings.emplace_back(Finding{severity, std::move(id), {}, std::move(what), {}, "", ""});
}

// A message of several lines: the first says what, the others why.
Finding& add_message(VerifyReport& report, std::string id, const std::string& message) {
  std::vector<std::string> lines = split(message, '\n');
  Finding& f = add(report, Severity::kError, std::move(id), lines[0]);
  for (std::size_t i = 1; i < lines.size(); ++i)
    f.why.push_back(lines[i].substr(std::min(lines[i].size(), lines[i].find_first_not_of(' '))));
  return f;
}

void add(VerifyReport& report, std::vector<Finding> findings) {
  std::move(findings.begin(), findings.end(), std::back_inserter(report.findings));
}

// ---- what there is

struct Opened {
  OpenCheckpoint checkpoint;
  std::string refusal;  // why the reader would not have it, where it was opened all the same

  Reader& reader() const { return *checkpoint.reader; }
  const Catalog& catalog() const { return checkpoint.reader->catalog(); }
};

// A checkpoint whose files do not fit its metadata is opened all the same, to say all that is wrong with it.
Result<Opened> open_to_audit(const Opener& open, const VerifyOptions& options) {
  OpenOptions how{.files_too = true,
                  .validated = false,
                  .keys = options.keys,
                  .layout = options.source_layout ? &*options.source_layout : nullptr,
                  .weights = options.weights};
  auto whole = open(options.path, how);
  if (whole) return Opened{*std::move(whole), ""};
  how.files_too = false;
  auto metadata = open(options.path, how);
  if (!metadata) return std::move(whole).error();
  return Opened{*std::move(metadata), whole.error().message()};
}

// The model by the config that was given, or by the checkpoint's own: that one may be of a model reshard does
// not know, or damaged.
Result<Model> recognise(Reader& reader, const VerifyOptions& options, VerifyReport& report) {
  auto config = config_of(reader, options.config);
  if (!config && !options.config.empty()) return std::move(config).error();
  checked(report, "config", "config.json describes a model", config && *config ? 1 : 0);
  if (!config && !options.model.is_none()) {
    Finding& f = add_message(report, "config", config.error().message());
    f.severity = Severity::kWarning;
    f.advice = "Nothing was held against it, and convert stops there. Mend it, or give another with --config.";
  }
  return recognise(reader.catalog(), options.model, config ? *std::move(config) : std::nullopt);
}

// ---- metadata

// Whether there are data, and whether they can be read as the metadata say.
struct Structure {
  bool metadata_only = false;
  bool is_readable = true;
};

Structure check_structure(const Opened& opened, const VerifyOptions& options, VerifyReport& report) {
  StructureAudit audit = audit_structure(opened.reader(), options.run.threads, options.spool);
  const Catalog& catalog = opened.catalog();
  const auto tensors = static_cast<Index>(catalog.tensors().size());
  const auto files = static_cast<Index>(catalog.files.size());
  Index pieces = 0;
  for (const Tensor& t : catalog.tensors()) pieces += static_cast<Index>(t.fragments.size());
  const bool is_refused = audit.findings.empty() && !opened.refusal.empty();
  if (is_refused) add_message(report, "reader", opened.refusal);
  checked(report, "cover", "every element is stored exactly once", tensors);
  if (audit.metadata_only)
    skipped(report, "file", "every file is there and long enough", "no data file is here, only metadata");
  else
    checked(report, "file", "every file is there and long enough", files);
  checked(report, "shared-bytes", "no two pieces claim the same bytes", pieces);
  if (audit.headers_read)
    checked(report, "header", "what is stored is what the metadata say", pieces);
  else
    skipped(report, "header", "what is stored is what the metadata say", "the headers around the pieces were not read");
  checked(report, "stale-files", "every file belongs to the checkpoint", files);
  checked(report, "unclaimed-bytes", "every byte of a data file belongs to a tensor or object", files);
  checked(report, "key-path", "names and paths in the state_dict agree", tensors);
  checked(report, "reader", "nothing is odd about the files", files);
  if (std::none_of(audit.findings.begin(), audit.findings.end(), [](const Finding& f) { return f.id == "cover"; }))
    fact(
        report, "cover",
        "every element of " + count_of(tensors, "tensor") + " is stored exactly once, in " + count_of(pieces, "piece"));
  if (audit.metadata_only)
    fact(report, "files", "none of the " + count_of(files, "data file") + " is here: metadata only");
  add(report, std::move(audit.findings));
  return {audit.metadata_only, audit.is_readable && !audit.metadata_only && !is_refused};
}

bool holds_optimizer_alone(const Catalog& catalog) {
  const auto is_of = [](StateKind kind) {
    return [kind](const auto& x) { return split_state_key(x.key()).kind == kind; };
  };
  const auto& tensors = catalog.tensors();
  return std::none_of(tensors.begin(), tensors.end(), is_of(StateKind::kModel)) &&
         (std::any_of(tensors.begin(), tensors.end(), is_of(StateKind::kOptimizer)) ||
          std::any_of(catalog.blobs.begin(), catalog.blobs.end(), is_of(StateKind::kOptimizer)));
}

void check_tokenizer(const Catalog& catalog, const Model& model, VerifyReport& report) {
  const std::string title = "the tokenizer has no token beyond the vocabulary";
  const Index words = model.config ? model.config->vocab_size() : 0;
  if (words < 1) return skipped(report, "tokenizer", title, "no config.json says how many words there are");
  const std::string place = parent_path(model.config->path);
  TokenizerAudit audit = audit_tokenizer(place.empty() ? catalog.root : place, model.config->path, words);
  if (!audit.skipped.empty()) return skipped(report, "tokenizer", title, std::move(audit.skipped));
  checked(report, "tokenizer", title, audit.tokens);
  add(report, std::move(audit.findings));
}

void check_names(const Catalog& catalog, const Model& model, VerifyReport& report) {
  const auto tensors = static_cast<Index>(catalog.tensors().size());
  checked(report, "adapter", "no adapter is left beside the weights it changes", tensors);
  checked(report, "placeholder", "no weight is an empty placeholder", tensors);
  if (!model.is_described()) checked(report, "name-duplicate", "no parameter is there under two names", tensors);
  add(report, audit_names(catalog, model));
}

// A model whose file has float32 where its config has half of that is twice as large as the one that was published.
// What training saved, or may go on from, keeps float32 on purpose.
void check_upcast(const ModelAudit& audit, const ModelConfig& config, const Catalog& catalog, VerifyReport& report) {
  const auto stored = dtype_from_torch(audit.uniform_dtype), due = dtype_from_torch(config.dtype);
  const bool is_training = report.format->holds != Holds::kModel ||
                           std::any_of(catalog.parts.begin(), catalog.parts.end(),
                                       [](const Part& part) { return part.kind != StateKind::kModel; });
  if (!stored || !due || byte_size(*stored) <= byte_size(*due) || is_training) return;
  const Index n = audit.expected_elements;
  Finding& f = add(report, Severity::kNote, "dtype-wider",
                   "the weights are " + audit.uniform_dtype + " where " + config.path + " says " + config.dtype);
  f.why.push_back(with_commas(n) + " parameters of " + std::to_string(byte_size(*stored)) + " bytes are " +
                  human_bytes(n * byte_size(*stored)) + ", of " + std::to_string(byte_size(*due)) + " bytes " +
                  human_bytes(n * byte_size(*due)));
  f.advice = "Loaders that follow the config cast them. convert --dtype " + config.dtype +
             " writes them so; where the file is to stay " + audit.uniform_dtype + ", the config can say it.";
}

// Of a model of no known family: rows of the vocabulary that are one tensor-parallel rank's.
void check_cut_vocabulary(const CommonFacts& facts, const ModelConfig& config, VerifyReport& report) {
  std::vector<VocabularyTensor> cut;
  for (const Tensor* t : facts.vocabulary)
    if (t->shape[0] < config.vocab_size() &&
        !explain_shard(t->shape[0], config.vocab_size(), config.num_attention_heads()).empty())
      cut.push_back({t->name, t->shape[0], t->shape[1] * byte_size(t->dtype)});
  if (!facts.vocabulary.empty())
    checked(report, "vocabulary", "embedding and head have a row for each word", std::ssize(facts.vocabulary));
  add(report, audit_vocabulary(cut, {config.path, config.vocab_size(), config.num_attention_heads()}));
}

Status check_model(const Catalog& catalog, const Model& model, const VerifyOptions& options, VerifyReport& report) {
  const bool wanted = !options.config.empty();
  const auto skip = [&](std::string why) {
    skipped(report, "shape", "every shape is as the config says", std::move(why));
    return Status();
  };
  if (wanted && holds_optimizer_alone(catalog)) {
    add(report, Severity::kNote, "no-model", "there is optimizer state and no model: nothing was held against --config")
        .advice = "Verify the directory that has the model too.";
    return skip("there is no model, only optimizer state");
  }
  if (wanted && catalog.tensors().empty())
    return unsupported(options.path + ": expected the model that --config describes, got no tensor at all");
  if (!model.is_described()) {
    const bool is_other = model.config && !describing_family(*model.config);
    const CommonFacts facts = is_other ? common_facts(catalog, *model.config) : CommonFacts();
    if (is_other) check_cut_vocabulary(facts, *model.config, report);
    if (!wanted) return skip("no config.json of a known family");
    if (describing_family(*model.config))
      return unsupported(options.path + ": no tensor is named as a parameter of the model that --config describes" +
                         choice_of_part(catalog));
    const std::string what = "model_type '" + printable(model.config->model_type) + "' of " + model.config->path +
                             " belongs to no family that reshard knows";
    const std::string held = facts.confirmed.empty()
                                 ? "no name and no shape was held against it"
                                 : "nothing was held against it but that " + join(facts.confirmed, " and ");
    add(report, Severity::kNote, "model-unknown", what + ": " + held).advice =
        "--family-file describes a family (docs/adding.md).";
    return skip(what);
  }
  const ModelConfig& config = *model.config;
  auto audit = audit_model(catalog, model);
  if (!audit && wanted) return std::move(audit).error();
  if (!audit) return skip(audit.error().message());
  const Index n = audit->expected_tensors;
  checked(report, "vocabulary", "embedding and head have a row for each word", n);
  checked(report, "shape", "every shape is as the config says", n);
  checked(report, "missing", "every tensor of the model is there", n);
  checked(report, "extra", "no tensor is there that the model has not", audit->looked_at);
  checked(report, "name", "every name is known, and none twice", audit->looked_at);
  checked(report, "dtype", "every dtype is as the config says", n);
  checked(report, "optimizer", "optimizer state fits its parameters", n);
  std::string text = config.path + ": " + std::string(model.family->title) + ", " + count_of(n, "tensor") + ", " +
                     count_of(audit->expected_elements, "parameter");
  if (audit->head_is_tied) text += "; the head is tied to the embedding and not stored";
  if (audit->padded_rows > 0)
    text += "; the vocabulary padded to " + with_commas(audit->padded_rows) + " rows, as Megatron does";
  if (!audit->uniform_dtype.empty()) text += "; kept in " + audit->uniform_dtype + ", for use in " + config.dtype;
  fact(report, "config", text);
  if (audit->findings.empty() && !catalog.shape_doubt.empty())
    std::erase_if(report.findings, [&](const Finding& f) { return f.what == catalog.shape_doubt; });
  add(report, std::move(audit->findings));
  check_upcast(*audit, config, catalog, report);
  return {};
}

// A declared vocabulary: its rows are the true ones or the padded ones.
void check_declared_vocabulary(const Catalog& catalog, const LayoutDescriptor& layout, VerifyReport& report) {
  if (!layout.vocabulary || !(layout.vocabulary->size || layout.vocabulary->padded_size)) return;
  const Vocabulary& v = *layout.vocabulary;
  Index looked_at = 0;
  for (const Tensor& t : catalog.tensors()) {
    if (t.shape.rank() == 0 || split_state_key(t.key()).kind != StateKind::kModel ||
        !any_glob_matches(v.tensors, t.name))
      continue;
    ++looked_at;
    const auto padded = v.padded_size ? Result<Index>(*v.padded_size) : layout.padded_rows(v.size.value_or(0));
    if ((v.size && t.shape[0] == *v.size) || (padded && t.shape[0] == *padded)) continue;
    Finding& f = add(report, Severity::kError, "declared-vocabulary",
                     with_commas(t.shape[0]) + " rows, which layout " + layout.name + " does not declare");
    f.tensors = {t.name};
    f.why.push_back("declared: " + (v.size ? with_commas(*v.size) + " true rows" : std::string("no true size")) +
                    (padded ? ", " + with_commas(*padded) + " with padding" : ""));
  }
  checked(report, "declared-vocabulary", "embedding and head have the rows that the layout declares", looked_at);
}

// Whether every tensor lies in one file, as formats that hold whole tensors have it.
bool is_gathered(const Catalog& catalog) {
  return std::all_of(catalog.tensors().begin(), catalog.tensors().end(), [](const Tensor& t) {
    for (std::size_t i = 1; i < t.fragments.size(); ++i)
      if (t.fragments.extent(i).file != t.fragments.extent(0).file) return false;
    return true;
  });
}

// How a layout or mesh that the user declared has each tensor lie. `placer` must outlive the result.
Result<DeclaredLayout> declared_layout(const Catalog& catalog, const Model& model, const VerifyOptions& options,
                                       const Format& format, std::optional<Placer>& placer) {
  DeclaredLayout out;
  if (options.layout) {
    const LayoutDescriptor& layout = *options.layout;
    out.title = "layout " + layout.name + (layout.mesh ? " (" + layout.mesh->to_string() + ")" : "");
    out.mesh = layout.mesh.value_or(Mesh());
    out.stages_are_exact = layout.pipeline.has_value();
    out.stored_whole = layout.stored_as == StoredAs::kWhole;
    Index layers = model.config ? model.config->num_hidden_layers() : 0;
    if (!model.config)
      for (const Tensor& t : catalog.tensors()) layers = std::max(layers, layer_number(t.name) + 1);
    out.place = [&layout, layers](const Tensor& t) { return layout.place_in_files(t.name, t.shape, layers); };
    return out;
  }
  out.mesh = *options.mesh;
  out.title = out.mesh.to_string();
  placer = TRY(Placer::make(out.mesh, model.family, model.config_or_null(), catalog));
  const bool has_own_rules = format.sharding == Sharding::kOwnLocal;
  out.place = [&placer, has_own_rules, mesh = out.mesh](const Tensor& t) -> Result<Placement> {
    Placement p = placer->place(t);
    for (const Split& split : p.splits) {
      Index ranks = 1;
      for (const std::string& axis : split.axes) ranks *= mesh.size(axis);
      if (has_own_rules && t.shape[split.dim] % ranks != 0)
        return unsupported(tensor_text(t.name) + ": the format pads it before it is cut");
    }
    return p;
  };
  return out;
}

Status check_layout(const Opened& opened, const Model& model, const VerifyOptions& options, VerifyReport& report) {
  if (!options.layout && !options.mesh) return {};
  const Catalog& catalog = opened.catalog();
  std::optional<Placer> placer;
  const DeclaredLayout declared = TRY(declared_layout(catalog, model, options, *opened.checkpoint.format, placer));
  if (options.layout) check_declared_vocabulary(catalog, *options.layout, report);
  MeshAudit audit = audit_mesh(catalog, declared, infer_mesh(catalog));
  if (audit.tensors == 0 && options.layout)
    return usage_error("layout " + options.layout->name + ": no pattern matches a tensor of " + options.path);
  checked(report, "layout", "every tensor is cut as declared", audit.tensors);
  checked(report, "world-size", "the files are of as many ranks as declared", declared.mesh.ranks());
  checked(report, "stages", "every pipeline stage wrote its layers", declared.mesh.size("pp"));
  if (audit.writers_compared)
    checked(report, "ranks", "every rank wrote what it holds", declared.mesh.ranks());
  else
    skipped(report, "ranks", "every rank wrote what it holds", "nothing tells which rank wrote a file");
  if (audit.findings.empty())
    fact(report, "layout",
         declared.title + ": " + count_of(audit.tensors, "tensor") + " in " + count_of(audit.pieces, "piece") +
             " are cut so");
  if (audit.flat > 0)
    fact(report, "",
         count_of(audit.flat, "tensor") +
             " of optimizer state are runs of elements, as FSDP1 cuts its flat "
             "parameters");
  if (audit.not_placed > 0)
    fact(report, "", count_of(audit.not_placed, "tensor") + " the layout says nothing of were not looked at");
  const Format& format = *opened.checkpoint.format;
  if (declared.mesh.ranks() > 1 && !declared.stored_whole && format.holds_whole_tensors() && is_gathered(catalog))
    add(report, Severity::kNote, "layout-gathered-format",
        std::string(format.title) + " files hold whole tensors: the mesh that trained them leaves no trace");
  else
    add(report, std::move(audit.findings));
  return {};
}

// ---- data

std::function<void(Index)> watch(const VerifyOptions& options, Index bytes) {
  return options.watch ? options.watch(bytes) : nullptr;
}

std::string checksums_text(Index count, const char* where) {
  return count > 0 ? count_of(count, "CRC-32 sum") + " recorded, all hold"
                   : std::string("read to the end; ") + where + " no checksums";
}

// Nothing where there is none.
Result<std::optional<Json>> read_manifest(const Opened& opened, const std::string& path, const std::string& manifest) {
  if (!is_directory(path) && !opened.checkpoint.format->is_file) return std::optional<Json>();
  const auto text = TRY(opened.reader().side_file(std::string(kManifestFile), kMaxManifestBytes));
  return text ? std::optional(TRY(parse_json(*text, manifest))) : std::optional<Json>();
}

ValueContext value_context(const Catalog& view, const Model& model) {
  ValueContext context;
  context.vocab_size = model.config ? model.config->vocab_size() : 0;
  for (const Tensor& t : view.tensors()) {
    const StateKey key = split_state_key(t.key());
    const auto parsed =
        model.family && !key.parameter.empty() ? parse_name(*model.family, key.parameter) : std::nullopt;
    if (parsed && parsed->rule->is_vocabulary()) context.vocabulary.push_back(t.name);
  }
  return context;
}

// The model's tensors that are kept twice, by those which are their float32 masters: one is the other rounded.
std::map<std::size_t, std::size_t> weights_of_masters(const Catalog& view) {
  std::map<std::string, std::size_t> model;
  for (std::size_t i = 0; i < view.tensors().size(); ++i)
    if (const Tensor& t = view.tensors()[i]; !t.model_dtype && split_state_key(t.key()).kind == StateKind::kModel)
      model.emplace(t.key(), i);
  std::map<std::size_t, std::size_t> out;
  for (std::size_t i = 0; i < view.tensors().size(); ++i) {
    const Tensor& t = view.tensors()[i];
    const StateKey key = split_state_key(t.key());
    const auto weight = key.suffix == kMasterSuffix ? model.find(key.parameter) : model.end();
    if (weight == model.end()) continue;
    const Tensor& w = view.tensors()[weight->second];
    if (w.shape == t.shape && byte_size(w.dtype) < byte_size(t.dtype) && can_convert(t.dtype, w.dtype))
      out.emplace(i, weight->second);
  }
  return out;
}

void check_masters(const Catalog& view, const std::map<std::size_t, std::size_t>& masters,
                   const std::vector<TensorProof>& proofs, VerifyReport& report) {
  if (masters.empty()) return;
  checked(report, "master-differs", "the weights are their masters, rounded", std::ssize(masters));
  std::vector<std::string> differing;
  for (const auto& [master, weight] : masters)
    if (!(proofs[master].target == proofs[weight].source)) differing.push_back(view.tensors()[weight].name);
  if (differing.empty()) return;
  Finding& f = add(report, Severity::kWarning, "master-differs",
                   std::string(differing.size() == 1 ? "is not its float32 master" : "are not their float32 masters") +
                       " rounded to the model's dtype");
  f.tensors = std::move(differing);
  f.advice =
      "Training goes on from the masters, a loader of the model takes the other: --weights master converts them.";
}

Status read_tensors(const Catalog& view, const Opened& opened, const Model& model, const VerifyOptions& options,
                    VerifyReport& report) {
  RunOptions run = options.run;
  run.progress = watch(options, view.tensor_bytes());
  std::vector<TensorProof> proofs;
  Index checksums = 0;
  if (options.values) {
    ValueContext context = value_context(view, model);
    context.exponents = options.exponents;
    ValueReport values = TRY(check_values(view, opened.reader().files(), context, run));
    proofs = std::move(values.proofs);
    checksums = values.checksums_checked;
    for (const auto& [id, title] :
         {std::pair("non-finite", "no NaN and no infinity"), std::pair("zero", "no weights and no rows are all zero"),
          std::pair("constant", "no weights and no rows are all the same"),
          std::pair("unused-tokens", "every word was trained"),
          std::pair("padding-rows", "no rows are there for padding alone"),
          std::pair("near-overflow", "no value is near its type's end"),
          std::pair("large-values", "no weight is absurdly large")})
      checked(report, id, title, std::ssize(values.tensors));
    report.values = std::move(values.tensors);
    add(report, std::move(values.findings));
  } else {
    FileSource source(view, opened.reader().files());
    std::vector<DigestRequest> requests;
    for (std::size_t i = 0; i < view.tensors().size(); ++i) requests.push_back({i, view.tensors()[i].dtype});
    const auto masters = weights_of_masters(view);
    for (const auto& [master, weight] : masters) requests[master].as = view.tensors()[weight].dtype;
    proofs = TRY(digest_tensors(requests, source, run));
    check_masters(view, masters, proofs, report);
    checksums = source.checksums_checked();
  }
  for (std::size_t i = 0; i < proofs.size(); ++i) {
    const Tensor& t = view.tensors()[i];
    report.tensors.push_back({t.name, t.dtype, t.shape, proofs[i].source, std::nullopt});
  }
  for (const Blob& blob : opened.catalog().blobs) TRY(opened.reader().blob_bytes(blob));  // checks them
  fact(report, "bytes", checksums_text(checksums, "the format records"));
  return {};
}

// What a format shows that was not written by itself: a weight that is its master or the other way round, a number of
// steps that is all parameters'.
Result<bool> is_shown_of_others(const VerifiedTensor& tensor, const Json& recorded) {
  const StateKey key = split_state_key(tensor.name);
  if (key.suffix == kStepSuffix) return recorded.contains(key.prefix + key.parameter + std::string(kMomentSuffix));
  const bool is_master = key.suffix == kMasterSuffix;
  const Json* other =
      recorded.find(is_master ? key.parameter : "optimizer.state." + tensor.name + std::string(kMasterSuffix));
  return other && TRY(other->get_string("digest")) == tensor.digest.hex();
}

Status compare_manifest(const Json& manifest, const std::string& path, VerifyReport& report) {
  checked(report, "manifest", "digests are as reshard_manifest.json says", std::ssize(report.tensors));
  const Json* recorded = manifest.find("tensors");
  if (!recorded || !recorded->is_object()) return corrupt(path + ": expected an object 'tensors'");
  std::vector<std::string> differing, unknown, absent;
  std::set<std::string_view> names;
  for (const VerifiedTensor& t : report.tensors) {
    names.insert(t.name);
    const Json* entry = recorded->find(t.name);
    if (!entry && TRY(is_shown_of_others(t, *recorded).context(path))) continue;
    if (!entry)
      unknown.push_back(t.name);
    else if (TRY(entry->get_string("digest").context(path)) != t.digest.hex())
      differing.push_back(t.name);
  }
  for (const auto& member : TRY(recorded->as_object()))
    if (!names.contains(member.key)) absent.push_back(member.key);
  if (differing.empty() && unknown.empty() && absent.empty())
    fact(report, "manifest", count_of(std::ssize(report.tensors), "digest") + " as reshard_manifest.json says");
  const auto say = [&](std::vector<std::string> tensors, std::string id, std::string what) {
    if (!tensors.empty()) add(report, Severity::kError, std::move(id), std::move(what)).tensors = std::move(tensors);
  };
  say(std::move(differing), "manifest-digest", "the digest differs from reshard_manifest.json");
  say(std::move(unknown), "manifest-unknown", "not in reshard_manifest.json");
  say(std::move(absent), "manifest-absent", "in reshard_manifest.json only");
  return {};
}

// A head that is stored although the config ties it has to equal the embedding: loaders take one of the two.
void check_tied_head(const Model& model, VerifyReport& report) {
  if (!model.is_described() || !model.config->tie_word_embeddings()) return;
  for (const VerifiedTensor& head : report.tensors) {
    const auto parsed = parse_name(*model.family, head.name);
    if (!parsed || parsed->rule->tied_to.empty()) continue;
    for (const VerifiedTensor& t : report.tensors) {
      if (canonical_key(*model.family, t.name) != parsed->rule->tied_to) continue;
      if (t.dtype != head.dtype || t.digest == head.digest) continue;
      Finding& f = add(report, Severity::kError, "tied-differ",
                       "differs from the embedding that " + model.config->path + " ties it to");
      f.tensors = {head.name};
      f.advice = "A loader keeps the embedding and drops the head: set tie_word_embeddings to false to keep both.";
    }
  }
}

Status check_replicas(const Opened& opened, const VerifyOptions& options, VerifyReport& report) {
  ReplicaReport replicas = TRY(compare_replicas(opened.catalog(), opened.reader().files(), options.run));
  checked(report, "replicas", "all copies of a piece are equal", replicas.copies);
  fact(report, "replicas",
       replicas.copies == 0
           ? std::string("the checkpoint stores every piece once; there is nothing to compare")
           : with_commas(replicas.copies) + (replicas.copies == 1 ? " further copy" : " further copies") + " of " +
                 count_of(replicas.tensors, "tensor") + " (" + human_bytes(replicas.bytes) + ") compared");
  add(report, std::move(replicas.findings));
  return {};
}

Result<Catalog> chosen_tensors(const Catalog& from, const std::vector<std::size_t>& wanted) {
  if (wanted.size() == from.tensors().size()) return from;
  Catalog out;
  out.root = from.root;
  out.files = from.files;
  out.vocabulary = from.vocabulary;
  for (const std::size_t i : wanted) TRY(out.add(from.tensors()[i]));
  return out;
}

Status read_everything(const Opened& opened, const Model& model, const VerifyOptions& options, VerifyReport& report) {
  const std::string path = path_join(options.path, kManifestFile);
  std::optional<Json> manifest = TRY(read_manifest(opened, options.path, path));
  if (!options.keys.part.empty()) manifest.reset();  // it is of all parts
  std::vector<std::size_t> wanted;
  for (std::size_t i = 0; i < opened.catalog().tensors().size(); ++i)
    if (is_of_part(opened.catalog().tensors()[i].key(), options.keys.part)) wanted.push_back(i);
  TRY(opened.reader().locate(wanted, options.run.threads, options.spool));
  const Catalog view = manifest ? TRY(recorded_view(*manifest, opened.catalog(), model.config_or_null()).context(path))
                                : TRY(chosen_tensors(opened.catalog(), wanted));
  TRY(read_tensors(view, opened, model, options, report));
  if (manifest) TRY(compare_manifest(*manifest, path, report));
  check_tied_head(model, report);
  std::vector<Digest> digests;
  for (const VerifiedTensor& t : report.tensors) digests.push_back(t.digest);
  checked(report, "weights", "no weights are stored under two names", std::ssize(digests));
  add(report, TRY(audit_duplicates(view, digests, model, opened.reader().files(), options.run)));
  return options.replicas ? check_replicas(opened, options, report) : Status();
}

constexpr const char* kBytesTitle = "checksums hold and digests are as recorded";

Status check_bytes(const Opened& opened, const Model& model, const Structure& structure, const VerifyOptions& options,
                   VerifyReport& report) {
  const auto skip = [&](std::string why) {
    skipped(report, "bytes", kBytesTitle, std::move(why));
    return Status();
  };
  if (!options.asks_for_data() && !options.asks_for_nothing())
    return skip("only metadata were asked about; --bytes reads all");
  if (structure.metadata_only && options.asks_for_data())
    add(report, Severity::kError, "file-missing", "no data file is here: there is nothing to read");
  if (!structure.is_readable) return skip("the data cannot be read as the metadata say");
  report.read_data = true;
  checked(report, "bytes", kBytesTitle, report.tensor_count);
  Status read = read_everything(opened, model, options, report);
  if (read || read.error().code() != ErrorCode::kCorrupt) return read;
  add_message(report, "bytes-damaged", read.error().message()).advice =
      "The reading ended there. Take this file from another copy of the checkpoint.";
  return {};
}

// ---- another checkpoint

void report_pairs(const Comparison& c, const std::vector<Comparison::Digests>& digests, VerifyReport& report) {
  Index equal = 0, converted = 0;
  std::vector<std::string> differing;
  report.tensors.clear();
  for (std::size_t i = 0; i < digests.size(); ++i) {
    const Tensor &a = c.a().tensors()[c.pairs()[i].a], &b = c.b().tensors()[c.pairs()[i].b];
    const bool same = digests[i].a == digests[i].b;
    report.tensors.push_back({a.name, a.dtype, a.shape, digests[i].a_as_stored,
                              VerifiedTensor::Other{b.dtype, digests[i].b_as_stored, same}});
    if (!same) differing.push_back(a.name);
    equal += same;
    converted += same && a.dtype != b.dtype;
  }
  if (!differing.empty())
    add(report, Severity::kError, "against-values", "values differ; reshard diff tells by how much").tensors =
        std::move(differing);
  fact(report, "equal",
       with_commas(equal) + " of " + count_of(std::ssize(digests), "tensor") + ", digest for digest" +
           (converted > 0 ? ", " + with_commas(converted) + " of them after conversion to the narrower dtype" : ""));
}

Status check_against(const Opener& open, const Opened& opened, const Structure& structure, const VerifyOptions& options,
                     VerifyReport& report) {
  if (options.against.empty()) return {};
  const std::string title = "equal to " + options.against;
  if (!structure.is_readable) {
    skipped(report, "against", title, "the data cannot be read as the metadata say");
    return {};
  }
  const OpenCheckpoint other =
      TRY(open(options.against, {.layout = options.source_layout ? &*options.source_layout : nullptr}));
  const auto c = TRY(Comparison::prepare(opened.reader(), *other.reader,
                                         {.model = options.model,
                                          .config = options.config,
                                          .spool = options.spool,
                                          .run = options.run,
                                          .of_two_formats = opened.checkpoint.format != other.format}));
  checked(report, "against", title, std::ssize(c->pairs()));
  report.read_data = true;
  for (std::string& d : c->structural_differences()) add(report, Severity::kError, "against-structure", std::move(d));
  c->set_progress(watch(options, c->bytes()));
  const auto digests = TRY(c->digests());
  c->set_progress(nullptr);
  const std::vector<std::string> objects = TRY(c->differing_objects());
  if (!options.asks_for_data()) fact(report, "bytes", checksums_text(c->checksums_checked(), "the formats record"));
  report_pairs(*c, digests, report);
  for (const std::string& name : objects)
    add(report, Severity::kError, "against-object", "object '" + printable(name) + "' differs");
  for (const std::string& text : c->not_compared()) fact(report, "not seen", text);
  return {};
}

}  // namespace

Result<VerifyReport> verify(const Opener& open, const VerifyOptions& options) {
  const Opened opened = TRY(open_to_audit(open, options));
  VerifyReport report;
  const Model model = TRY(recognise(opened.reader(), options, report));
  report.format = opened.checkpoint.format;
  report.tensor_count = std::ssize(opened.catalog().tensors());
  report.tensor_bytes = opened.catalog().tensor_bytes();
  const Structure structure = check_structure(opened, options, report);
  TRY(check_model(opened.catalog(), model, options, report));
  check_names(opened.catalog(), model, report);
  check_tokenizer(opened.catalog(), model, report);
  TRY(check_layout(opened, model, options, report));
  TRY(check_bytes(opened, model, structure, options, report));
  TRY(check_against(open, opened, structure, options, report));
  sort_by_severity(report.findings);
  report.model = model;
  return report;
}

}  // namespace reshard
