// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "lib/audit/comparison.h"
#include "lib/audit/mesh_audit.h"
#include "lib/audit/metadata_audits.h"
#include "lib/audit/unknown_model_audit.h"
#include "lib/audit/verification_steps.h"
#include "lib/audit/vocabulary.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/model/parts.h"
#include "lib/model/placement.h"
#include "lib/model/quantization.h"
#include "lib/source/watched_files.h"

namespace reshard {
namespace {

// Opens a checkpoint even if its files do not match its metadata, so that all problems can be reported.
Result<OpenedSource> open_to_audit(const Opener& open, const VerifyOptions& options) {
  OpenOptions how{.files_too = true,
                  .validated = false,
                  .keys = options.keys,
                  .layout = options.source_layout ? &*options.source_layout : nullptr,
                  .weights = options.weights,
                  .own_family = options.model.families.own(),
                  .config = options.config};
  const IoFailureWatch watch;
  auto whole = open(options.path, how);
  if (whole) return OpenedSource{*std::move(whole), ""};
  if (watch.may_be_io_failure(whole.error())) return std::move(whole).error();
  how.files_too = false;
  how.skip_damaged = true;
  auto metadata = open(options.path, how);
  if (!metadata) return std::move(whole).error();
  return OpenedSource{*std::move(metadata), whole.error().message()};
}

// Recognises the model by the given config or the checkpoint's own, which may describe an unknown model or be damaged.
Result<Model> recognise(Reader& reader, const VerifyOptions& options, VerifyReport& report) {
  const IoFailureWatch watch;
  auto config = config_of(reader, options.config, options.model.families);
  if (!config && (!options.config.empty() || watch.may_be_io_failure(config.error()))) return std::move(config).error();
  report.checked("config", "config.json describes a model", config && *config ? 1 : 0);
  if (!config && !options.model.is_none()) {
    Finding& f = report.add_message("config", config.error().message());
    f.severity = Severity::kWarning;
    f.advice =
        "The tensors were not compared with it, and convert stops there. Repair it, or give another with --config.";
  }
  return recognise(reader.catalog(), options.model, config ? *std::move(config) : std::nullopt);
}

// ---- Metadata

Structure check_structure(const OpenedSource& opened, const VerifyOptions& options, VerifyReport& report) {
  StructureAudit audit = audit_structure(opened.reader(), options.run.threads, options.spool);
  const Catalog& catalog = opened.catalog();
  const auto tensors = std::ssize(catalog.tensors());
  const auto files = std::ssize(catalog.files);
  Index pieces = 0;
  for (const Tensor& t : catalog.tensors()) pieces += std::ssize(t.fragments);
  const bool is_refused = audit.findings.empty() && !opened.refusal.empty();
  if (is_refused) report.add_message("reader", opened.refusal);
  report.checked("cover", "every element is stored exactly once", tensors);
  if (audit.metadata_only)
    report.skipped("file", "every file exists and is long enough", "there are no data files, only metadata");
  else
    report.checked("file", "every file exists and is long enough", files);
  report.checked("shared-bytes", "no two pieces claim the same bytes", pieces);
  if (audit.headers_read)
    report.checked("header", "the stored data matches the metadata", pieces);
  else
    report.skipped("header", "the stored data matches the metadata", "the headers around the pieces were not read");
  report.checked("stale-files", "every file belongs to the checkpoint", files);
  report.checked("unclaimed-bytes", "every byte of a data file belongs to a tensor or object", files);
  report.checked("key-path", "names and paths in the state_dict agree", tensors);
  report.checked("reader", "the files are consistent", files);
  if (tensors > 0 &&
      std::none_of(audit.findings.begin(), audit.findings.end(), [](const Finding& f) { return f.id == "cover"; }))
    report.fact("cover", "every element of " + count_of(tensors, "tensor") + " is stored exactly once, in " +
                             count_of(pieces, "piece"));
  if (audit.metadata_only)
    report.fact("files", "none of the " + count_of(files, "data file") + " is here: metadata only");
  report.add(std::move(audit.findings));
  return {audit.metadata_only, audit.is_readable && !audit.metadata_only && !is_refused, std::move(audit.unreadable)};
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

// Returns whether it has weights of a model, not only adapters.
bool holds_weights(const Catalog& catalog) {
  const auto& tensors = catalog.tensors();
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) {
    return split_state_key(t.key()).kind == StateKind::kModel && !is_adapter(t.key()) &&
           !t.key().starts_with(kPeftPrefix);
  });
}

void check_tokenizer(const Catalog& catalog, const Model& model, VerifyReport& report) {
  const std::string title = "the tokenizer has no token beyond the vocabulary";
  const Index words = model.config ? model.config->vocab_size() : 0;
  if (words < 1) return report.skipped("tokenizer", title, "no config.json gives the number of tokens");
  const std::string place = parent_path(model.config->path);
  TokenizerAudit audit = audit_tokenizer(place.empty() ? catalog.root : place, model.config->path, words);
  if (!audit.skipped.empty()) return report.skipped("tokenizer", title, std::move(audit.skipped));
  report.checked("tokenizer", title, audit.tokens);
  report.add(std::move(audit.findings));
}

void check_names(const Catalog& catalog, const Model& model, VerifyReport& report) {
  const auto tensors = std::ssize(catalog.tensors());
  report.checked("adapter", "adapters are complete, and not next to the weights they change", tensors);
  report.checked("placeholder", "no weight is an empty placeholder", tensors);
  if (!model.is_described()) {
    report.checked("name-duplicate", "no parameter is stored under two names", tensors);
    if (model.family) report.checked("shape-contradiction", "the shapes are those of one model of the family", tensors);
  }
  report.add(audit_names(catalog, model));
}

void check_packed(const Catalog& catalog, const Model& model, VerifyReport& report) {
  PackedAudit audit = audit_packed(catalog, model);
  if (audit.looked_at == 0) return;
  report.checked("packed", "every packed weight has all its tensors, in matching shapes", audit.looked_at);
  report.fact("packed", audit.text);
  report.add(std::move(audit.findings));
}

void check_optimizer(const Catalog& catalog, VerifyReport& report) {
  const std::string title = "optimizer state fits its parameters";
  if (holds_optimizer_alone(catalog))
    return report.skipped("optimizer", title, "there is only optimizer state, no model");
  OptimizerAudit audit = audit_optimizer(catalog);
  report.checked("optimizer", title, audit.looked_at);
  report.add(std::move(audit.findings));
}

// Reports a model stored in float32 although its config names a dtype of half the size: it is twice as large as the
// published one. Training state keeps float32 on purpose.
void check_upcast(const ModelAudit& audit, const ModelConfig& config, const Catalog& catalog, VerifyReport& report) {
  const auto stored = dtype_from_torch(audit.uniform_dtype), expected = dtype_from_torch(config.dtype);
  const bool is_training = report.format->holds != StateSupport::kModel ||
                           std::any_of(catalog.parts.begin(), catalog.parts.end(),
                                       [](const Part& part) { return part.kind != StateKind::kModel; });
  if (!stored || !expected || byte_size(*stored) <= byte_size(*expected) || is_training) return;
  const Index n = audit.expected_elements;
  Finding& f = report.add(Severity::kNote, "dtype-wider",
                          "the weights are " + audit.uniform_dtype + "; " + config.path + " expects " + config.dtype);
  f.why.push_back(count_of(n, "parameter") + " of " + bytes_of(byte_size(*stored)) + " take " +
                  human_bytes(n * byte_size(*stored)) + ", with " + bytes_of(byte_size(*expected)) + " each " +
                  human_bytes(n * byte_size(*expected)));
  f.advice = "Loaders that follow the config convert them. convert --dtype " + config.dtype +
             " writes them like this; to keep " + audit.uniform_dtype + ", change the dtype in the config.";
}

constexpr const char* kShapeTitle = "every shape matches the config";
constexpr std::string_view kNotChecked = "not checked: ";

// Checks the numbers that every config has, if no family describes the model.
void check_unknown_model(const Catalog& catalog, const ModelConfig& config, bool is_wanted, VerifyReport& report) {
  UnknownModelAudit audit = audit_unknown_model(catalog, config);
  const auto compared = audit.architecture.empty() ? std::ssize(audit.compared) : std::ssize(catalog.tensors());
  for (const auto& [id, title] : {std::pair("vocabulary", "embedding and head have a row for each token"),
                                  std::pair("shape", "the sizes that the config names are those of the tensors"),
                                  std::pair("missing", "every layer and expert of the config is present"),
                                  std::pair("extra", "every stored layer and expert is in the config")})
    if (audit.has_compared(std::string_view(id) == "extra" ? "missing" : id)) report.checked(id, title, compared);
  const std::string text = summary(audit, config);
  report.fact("config", text);
  if (!audit.has_compared("shape"))
    report.skipped("shape", kShapeTitle, text.substr(text.find(kNotChecked) + kNotChecked.size()));
  if (is_wanted && audit.compared.empty() && audit.architecture.empty())
    report.add(Severity::kNote, "model-unknown", text).advice = "--family-file describes a family (docs/adding.md).";
  report.add(std::move(audit.findings));
}

// Records that a config was not compared with the tensors, and why.
void skip_config(const std::string& path, const std::string& why, VerifyReport& report) {
  report.fact("config", (path.empty() ? "" : path + ": ") + std::string(kNotChecked) + why);
  report.skipped("shape", kShapeTitle, why);
}

// Returns why there is no config to compare with.
void skip_absent_config(Reader& reader, const VerifyOptions& options, VerifyReport& report) {
  const auto file = find_config_file(reader, options.config, options.model.families);
  if (options.model.is_none()) return skip_config(file ? file->path : "", "--family none", report);
  if (!file) return skip_config("", "config.json cannot be read", report);
  if (!file->is_there()) return skip_config("", "no config.json found; give one with --config", report);
  const auto is_of_model = file->is_of_model();
  skip_config(file->path, is_of_model.has_value() && !*is_of_model ? "it has no model_type" : "it cannot be read",
              report);
}

// Fails if the config was given by the user and belongs to a family whose names no tensor has.
Status check_undescribed_model(Reader& reader, const Model& model, const VerifyOptions& options, VerifyReport& report) {
  const Catalog& catalog = reader.catalog();
  const Family* const said = model.config ? describing_family(*model.config) : nullptr;
  if (!model.config || (said && options.model.is_none())) {
    skip_absent_config(reader, options, report);
    return {};
  }
  const ModelConfig& config = *model.config;
  const bool is_wanted = !options.config.empty();
  if (!said) {
    check_unknown_model(catalog, config, is_wanted, report);
    return {};
  }
  const std::string choice = choice_of_part(catalog);
  if (!choice.empty()) {
    if (is_wanted) return unsupported(options.path + ": " + choice);
    skip_config(config.path, choice, report);
    return {};
  }
  const NameAgreement names = compare_names(*said, catalog, &config);
  if (is_wanted)
    return unsupported(options.path + ": " +
                       (names.known.empty()
                            ? "no tensor has the name of a parameter of the model that --config describes"
                            : "--config describes a model of family " + said->name + ", and " + names.text()));
  if (!holds_weights(catalog)) {
    skip_config(config.path, "no tensor is a weight of this model", report);
    return {};
  }
  report.add(Severity::kWarning, "model-other", config.path + " is of family " + said->name + ", and " + names.text())
      .advice =
      "The tensors were not compared with it, and convert refuses it; if it is of another model, --family none "
      "ignores it, and --strip-prefix and --rename change names.";
  skip_config(config.path, "the tensor names do not match family " + said->name, report);
  return {};
}

std::string described_text(const Model& model, const ModelAudit& audit) {
  std::string text = model.config->path + ": " + std::string(model.family->title) + ", " +
                     count_of(audit.expected_tensors, "tensor") + ", " + count_of(audit.expected_elements, "parameter");
  if (audit.head_is_tied) text += "; the head is tied to the embedding and not stored";
  if (audit.padded_rows > 0) text += "; the vocabulary padded to " + count_of(audit.padded_rows, "row");
  if (!audit.uniform_dtype.empty()) text += "; kept in " + audit.uniform_dtype + ", for use in " + model.config->dtype;
  return text;
}

Status check_described_model(const Catalog& catalog, const Model& model, bool is_wanted, VerifyReport& report) {
  auto audit = audit_model(catalog, model);
  if (!audit && is_wanted) return std::move(audit).error();
  if (!audit) {
    skip_config("", audit.error().message(), report);
    return {};
  }
  const Index n = audit->expected_tensors;
  report.checked("vocabulary", "embedding and head have a row for each token", n);
  report.checked("shape", kShapeTitle, n);
  report.checked("missing", "every tensor of the model is present", n);
  report.checked("extra", "no tensor is present that the model lacks", audit->looked_at);
  report.checked("name", "every name is known and occurs once", audit->looked_at);
  report.checked("dtype", "every dtype matches the config", n);
  report.fact("config", described_text(model, *audit));
  if (audit->findings.empty() && !catalog.shape_doubt.empty())
    std::erase_if(report.findings, [&](const Finding& f) { return f.what == catalog.shape_doubt; });
  report.add(std::move(audit->findings));
  check_upcast(*audit, *model.config, catalog, report);
  return {};
}

Status check_model(Reader& reader, const Model& model, const VerifyOptions& options, VerifyReport& report) {
  const bool is_wanted = !options.config.empty();
  const Catalog& catalog = reader.catalog();
  if (holds_optimizer_alone(catalog)) {
    if (is_wanted)
      report
          .add(Severity::kNote, "no-model", "there is optimizer state and no model: nothing was compared with --config")
          .advice = "Verify the directory that also contains the model.";
    skip_config(model.config ? model.config->path : "", "there is only optimizer state, no model", report);
    return {};
  }
  if (is_wanted && catalog.tensors().empty())
    return unsupported(options.path + ": expected the model that --config describes, got no tensors");
  return model.is_described() ? check_described_model(catalog, model, is_wanted, report)
                              : check_undescribed_model(reader, model, options, report);
}

// A declared vocabulary: its rows are the true ones or the padded ones.
void check_declared_vocabulary(const Catalog& catalog, const LayoutDescriptor& layout, VerifyReport& report) {
  if (!layout.vocabulary || !(layout.vocabulary->size || layout.vocabulary->padded_size)) return;
  const Vocabulary& v = *layout.vocabulary;
  Index looked_at = 0;
  for (const Tensor& t : catalog.tensors()) {
    if (t.shape.rank() == 0 || split_state_key(t.key()).kind != StateKind::kModel ||
        !(any_glob_matches(v.tensors, t.name) || any_glob_matches(v.tensors, t.key())))
      continue;
    ++looked_at;
    const auto padded = v.padded_size ? Result<Index>(*v.padded_size) : layout.padded_rows(v.size.value_or(0));
    if ((v.size && t.shape[0] == *v.size) || (padded && t.shape[0] == *padded)) continue;
    Finding& f = report.add(Severity::kError, "declared-vocabulary",
                            count_of(t.shape[0], "row") + "; layout " + layout.name + " declares another number");
    f.tensors = {t.name};
    f.why.push_back("declared: " + (v.size ? with_commas(*v.size) + " true rows" : std::string("no true size")) +
                    (padded ? ", " + with_commas(*padded) + " with padding" : ""));
  }
  report.checked("declared-vocabulary", "embedding and head have the rows that the layout declares", looked_at);
}

// Returns whether every tensor is in one file, as in formats that hold whole tensors.
bool is_gathered(const Catalog& catalog) {
  return std::all_of(catalog.tensors().begin(), catalog.tensors().end(), [](const Tensor& t) {
    for (std::size_t i = 1; i < t.fragments.size(); ++i)
      if (t.fragments.extent(i).file != t.fragments.extent(0).file) return false;
    return true;
  });
}

// Returns the placements of a layout or mesh that the user declared. `placer` must outlive the result.
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
      for (const Tensor& t : catalog.tensors()) layers = std::max(layers, layer_number(t.key()) + 1);
    // Patterns match stored names, or the model's own, as in the built-in layouts.
    out.place = [&layout, layers](const Tensor& t) {
      auto placed = layout.place_in_files(t.name, t.shape, layers);
      return placed || t.plain_key.empty() ? placed : layout.place_in_files(t.plain_key, t.shape, layers);
    };
    return out;
  }
  out.mesh = *options.mesh;
  out.title = out.mesh.to_string();
  placer = TRY(Placer::make(out.mesh, model.family, model.config_or_null(), Placer::of(catalog)));
  const bool has_own_rules = format.sharding == Sharding::kOwnLocal;
  const auto packed = std::make_shared<const PackedWeights>(find_packed(catalog, model.config_or_null()));
  out.place = [&placer, &catalog, packed, has_own_rules, has_family = model.family != nullptr,
               mesh = out.mesh](const Tensor& t) -> Result<Placement> {
    const PackedWeight* const weight = packed->of(static_cast<std::size_t>(&t - catalog.tensors().data()));
    if (weight && !(has_family && is_known_to_families(weight->packing)))
      return unsupported(tensor_text(t.name) + ": part of a packed weight, for which no sharding rule is known");
    Placement p = placer->place(Placer::of(t));
    for (const Split& split : p.splits) {
      Index ranks = 1;
      for (const std::string& axis : split.axes) ranks *= mesh.size(axis);
      if (has_own_rules && t.shape[split.dim] % ranks != 0)
        return unsupported(tensor_text(t.name) + ": the format pads it before sharding");
    }
    return p;
  };
  return out;
}

// Makes missing cover a consequence if the pieces belong to ranks that wrote nothing.
void explain_cover(const MeshAudit& audit, VerifyReport& report) {
  const std::set<std::string> lacking(audit.lacking.begin(), audit.lacking.end());
  for (Finding& f : report.findings)
    if (f.id == "cover" && std::all_of(f.tensors.begin(), f.tensors.end(),
                                       [&](const std::string& name) { return lacking.contains(name); }))
      f.causes.emplace_back("ranks-silent");
}

Status check_layout(const OpenedSource& opened, const Model& model, const VerifyOptions& options,
                    VerifyReport& report) {
  if (!options.layout && !options.mesh) return {};
  const Catalog& catalog = opened.catalog();
  std::optional<Placer> placer;
  const DeclaredLayout declared = TRY(declared_layout(catalog, model, options, *opened.checkpoint.format, placer));
  if (options.layout) check_declared_vocabulary(catalog, *options.layout, report);
  MeshAudit audit = audit_mesh(catalog, declared, infer_mesh(catalog));
  if (audit.tensors == 0 && options.layout)
    return usage_error("layout " + options.layout->name + ": no pattern matches a tensor of " + options.path);
  report.checked("layout", "every tensor is sharded as declared", audit.tensors);
  report.checked("world-size", "the files come from as many ranks as declared", declared.mesh.ranks());
  const std::string unseen =
      !audit.writers_compared ? "it is unknown which rank wrote a file" : std::string(audit.ranks_skipped);
  for (const auto& [id, title, looked_at] :
       {std::tuple("stages", "every pipeline stage wrote its layers", declared.mesh.size("pp")),
        std::tuple("ranks", "every rank wrote what it holds", declared.mesh.ranks())})
    if (unseen.empty())
      report.checked(id, title, looked_at);
    else
      report.skipped(id, title, unseen);
  explain_cover(audit, report);
  if (audit.findings.empty())
    report.fact("layout", declared.title + ": " + count_of(audit.tensors, "tensor") + " in " +
                              count_of(audit.pieces, "piece") + " match");
  if (audit.flat > 0)
    report.fact("", count_of(audit.flat, "tensor") +
                        " of optimizer state are runs of elements, as FSDP1 cuts its flat "
                        "parameters");
  if (audit.not_placed > 0)
    report.fact("", count_of(audit.not_placed, "tensor") + " not covered by the layout, so not checked");
  const Format& format = *opened.checkpoint.format;
  if (declared.mesh.ranks() > 1 && !declared.stored_whole && format.holds_whole_tensors() && is_gathered(catalog))
    report.add(Severity::kNote, "layout-gathered-format",
               std::string(format.title) + " files contain whole tensors, so they do not depend on the mesh");
  else
    report.add(std::move(audit.findings));
  return {};
}

// Adds the parameters of a stored tensor by the family's names.
void add_parameters_of(const Family& family, const std::string& name, std::set<std::string, std::less<>>& out) {
  const auto parsed = parse_name(family, name);
  if (!parsed) return;
  out.insert(canonical_name(*parsed));
  if (!parsed->stored) return;
  for (const std::string& part : parsed->stored->parts) out.insert(format_pattern(part, parsed->layer, parsed->expert));
}

// If files could not be read, marks the findings that follow from that as consequences: missing tensors, and tensors
// that lack parts.
void explain_missing(const Catalog& catalog, const Model& model, VerifyReport& report) {
  if (catalog.unread_files.empty()) return;
  std::set<std::string, std::less<>> unread;
  bool is_known = true;
  for (const UnreadFile& file : catalog.unread_files) {
    is_known = is_known && !file.tensors.empty();
    unread.insert(file.tensors.begin(), file.tensors.end());
    for (const std::string& name : file.tensors)
      if (model.family) add_parameters_of(*model.family, name, unread);
  }
  static constexpr std::string_view kMissing[] = {
      "cover",          "missing-layers",   "missing-experts",   "missing-head", "missing-tensors",
      "packed-missing", "optimizer-orphan", "optimizer-missing", "ranks-silent", "stages-missing"};
  std::set<std::string, std::less<>> lacking;
  for (const Finding& f : report.findings)
    if (f.id == "file-unreadable") lacking.insert(f.tensors.begin(), f.tensors.end());
  const auto is_of_lacking = [&](const Finding& f) {
    return f.id != "file-unreadable" && !f.tensors.empty() &&
           std::all_of(f.tensors.begin(), f.tensors.end(), [&](const auto& name) { return lacking.contains(name); });
  };
  for (Finding& f : report.findings)
    if (is_of_lacking(f)) {
      f.causes.emplace_back("file-unreadable");
    } else if (std::find(std::begin(kMissing), std::end(kMissing), f.id) != std::end(kMissing) &&
               (!is_known || std::all_of(f.tensors.begin(), f.tensors.end(), [&](const std::string& name) {
                 return unread.contains(name) || unread.contains(split_state_key(name).parameter);
               })))
      f.causes.emplace_back("file-unreadable");
}

// ---- Another checkpoint

// Describes how dtypes of equal width may explain a difference.
std::string unrecorded_cast(const Tensor& a, const Tensor& b) {
  return tensor_text(a.name) + " is " + std::string(info(a.dtype).torch_name) + " here and " +
         std::string(info(b.dtype).torch_name) +
         " there: a cast from one to the other changes values, and no reshard_manifest.json records one";
}

void report_pairs(const Comparison& c, const std::vector<Comparison::Digests>& digests, VerifyReport& report) {
  using Cast = Comparison::Cast;
  Index equal = 0;
  std::map<Cast, Index> converted;
  std::vector<std::string> differing, why;
  report.tensors.clear();
  for (std::size_t i = 0; i < digests.size(); ++i) {
    const Tensor &a = c.a().tensors()[c.pairs()[i].a], &b = c.b().tensors()[c.pairs()[i].b];
    const Cast cast = digests[i].cast;
    const bool same = digests[i].a == digests[i].b && (cast != Cast::kNone || a.dtype == b.dtype);
    report.tensors.push_back({a.name, a.dtype, a.shape, digests[i].a_as_stored,
                              VerifiedTensor::Other{b.dtype, digests[i].b_as_stored, same}});
    if (!same) differing.push_back(a.name);
    if (!same && cast == Cast::kUnrecorded && why.empty()) why.push_back(unrecorded_cast(a, b));
    equal += same;
    if (same) ++converted[cast];
  }
  if (!differing.empty()) {
    Finding& f = report.add(Severity::kError, "against-values", "values differ; run reshard diff to see by how much");
    f.tensors = std::move(differing);
    f.why = std::move(why);
  }
  std::string text = with_commas(equal) + " of " + count_of(std::ssize(digests), "tensor") + ", digest for digest";
  for (const auto& [cast, how] : {std::pair(Cast::kNarrower, "after conversion to the narrower dtype"),
                                  std::pair(Cast::kRecorded, "after the cast that reshard_manifest.json records")})
    if (converted[cast] > 0) text += ", " + with_commas(converted[cast]) + " of them " + how;
  report.fact("equal", std::move(text));
}

// Reports files that changed during the audit, because the findings may be of a mix of two versions.
void check_unchanged(const WatchedFiles& read, VerifyReport& report) {
  const auto path = read.replaced();
  if (!path) return;
  report
      .add(Severity::kError, "changed-meanwhile",
           printable(*path) + ": the file changed while it was read, so the findings may mix two versions")
      .advice = "Verify again once nothing writes to it.";
  std::rotate(report.findings.begin(), report.findings.end() - 1, report.findings.end());
}

Status check_against(const Opener& open, const OpenedSource& opened, const Structure& structure,
                     const VerifyOptions& options, VerifyReport& report) {
  if (options.against.empty()) return {};
  const std::string title = "equal to " + options.against;
  if (!structure.is_readable) {
    report.skipped("against", title, "the data cannot be read as the metadata says");
    return {};
  }
  const OpenCheckpoint other =
      TRY(open(options.against, {.layout = options.source_layout ? &*options.source_layout : nullptr,
                                 .own_family = options.model.families.own()}));
  const auto c = TRY(Comparison::prepare(opened.reader(), *other.reader,
                                         {.model = options.model,
                                          .config = options.config,
                                          .spool = options.spool,
                                          .run = options.run,
                                          .of_two_formats = opened.checkpoint.format != other.format,
                                          .same_value = options.same_value}));
  const WatchedFiles read(other.reader->catalog().file_paths());
  report.checked("against", title, std::ssize(c->pairs()));
  report.read_data = true;
  for (std::string& d : c->structural_differences()) report.add(Severity::kError, "against-structure", std::move(d));
  c->set_progress(watch(options, c->bytes()));
  const auto digests = TRY(c->digests());
  c->set_progress(nullptr);
  const std::vector<std::string> objects = TRY(c->differing_objects());
  if (!options.asks_for_data()) report.fact("bytes", checksums_text(c->checksums_checked(), "the formats record"));
  report_pairs(*c, digests, report);
  for (const std::string& name : objects)
    report.add(Severity::kError, "against-object", "object '" + printable(name) + "' differs");
  for (const std::string& text : c->renamed()) report.fact("names", text);
  for (const std::string& text : c->not_compared()) report.fact("not seen", text);
  check_unchanged(read, report);
  return {};
}

}  // namespace

void VerifyReport::checked(std::string id, std::string title, Index looked_at) {
  checks.push_back({std::move(id), std::move(title), looked_at, ""});
}

void VerifyReport::skipped(std::string id, std::string title, std::string why) {
  checks.push_back({std::move(id), std::move(title), 0, std::move(why)});
}

void VerifyReport::fact(std::string label, std::string text) { facts.emplace_back(std::move(label), std::move(text)); }

Finding& VerifyReport::add(Severity severity, std::string id, std::string what) {
  return findings.emplace_back(Finding{severity, std::move(id), {}, std::move(what), {}, "", ""});
}

Finding& VerifyReport::add_message(std::string id, const std::string& message) {
  std::vector<std::string> lines = split(message, '\n');
  Finding& f = add(Severity::kError, std::move(id), lines[0]);
  for (std::size_t i = 1; i < lines.size(); ++i)
    f.why.push_back(lines[i].substr(std::min(lines[i].size(), lines[i].find_first_not_of(' '))));
  return f;
}

void VerifyReport::add(std::vector<Finding> more) { std::move(more.begin(), more.end(), std::back_inserter(findings)); }

Result<VerifyReport> verify(const Opener& open, const VerifyOptions& options) {
  const OpenedSource opened = TRY(open_to_audit(open, options));
  const WatchedFiles read(opened.catalog().file_paths());
  VerifyReport report;
  const Model model = TRY(recognise(opened.reader(), options, report));
  report.format = opened.checkpoint.format;
  report.tensor_count = std::ssize(opened.catalog().tensors());
  report.tensor_bytes = opened.catalog().tensor_bytes();
  const Structure structure = check_structure(opened, options, report);
  TRY(check_model(opened.reader(), model, options, report));
  check_names(opened.catalog(), model, report);
  check_packed(opened.catalog(), model, report);
  check_optimizer(opened.catalog(), report);
  check_tokenizer(opened.catalog(), model, report);
  TRY(check_layout(opened, model, options, report));
  TRY(check_bytes(opened, model, structure, options, report));
  if (options.file_sums)
    report.files = TRY(file_sums(opened.catalog(), model.config ? model.config->path : "", options.run));
  TRY(check_against(open, opened, structure, options, report));
  explain_missing(opened.catalog(), model, report);
  fold_consequences(report.findings, report.checks);
  check_unchanged(read, report);
  sort_by_severity(report.findings);
  report.model = model;
  return report;
}

}  // namespace reshard
