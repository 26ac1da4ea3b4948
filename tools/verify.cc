// reshard verify: is what lies on disk the model and the layout that was asked for, and are its bytes what they were?
#include <chrono>
#include <cstdio>

#include "lib/audit/check_values.h"
#include "lib/audit/mesh_audit.h"
#include "lib/audit/model_audit.h"
#include "lib/audit/replicas.h"
#include "lib/audit/structure_audit.h"
#include "lib/base/text.h"
#include "lib/model/placement.h"
#include "lib/model/view.h"
#include "tools/commands.h"
#include "tools/comparing.h"
#include "tools/findings_report.h"
#include "tools/job_options.h"

namespace reshard::tools {
namespace {

constexpr Index kMaxManifestBytes = Index{1} << 30;
constexpr std::size_t kShownValues = 20;

struct VerifyOptions {
  std::string path, against, layout, mesh;
  bool bytes = false, values = false, replicas = false;
  std::size_t limit = 20;
  SourceOptions source_layout;
  ModelOptions model;
  ResourceOptions resources;
  FindingsOptions findings;

  // Without another question, everything there is to check is.
  bool reads_bytes() const {
    const bool asks_metadata_only = !model.config.empty() || !layout.empty() || !mesh.empty();
    return bytes || values || replicas || (!asks_metadata_only && against.empty());
  }
};

// The view under which a manifest's digests were taken.
Result<Catalog> manifest_view(const Json& manifest, const Catalog& native, const std::optional<ModelConfig>& config) {
  const Json* family_name = manifest.find("family");
  if (!family_name || family_name->is_null()) return native;
  for (const Family* family : families()) {
    if (family->name != TRY(family_name->as_string())) continue;
    std::optional<ModelConfig> untied = config;
    if (untied) untied->set("tie_word_embeddings", 0);  // what is not stored has no digest
    return canonical_view(native, {family, untied ? &*untied : nullptr, TRY(manifest.get_bool("hf_rows")), true, true},
                          nullptr);
  }
  return unsupported("reshard_manifest.json names a family this version does not know");
}

// One run of the audit: checks are made one after the other, each adds its findings and what it looked at.
class Verification {
 public:
  Verification(const VerifyOptions& options, RunOptions run) : options_(options), run_(std::move(run)) {}

  Result<int> run() {
    const auto start = std::chrono::steady_clock::now();
    const Severity threshold = TRY(options_.findings.threshold());
    report_.title = "reshard verify " + options_.path;
    TRY(open());
    TRY(read_model_config());
    check_structure();
    TRY(check_model());
    TRY(check_mesh());
    TRY(check_bytes());
    TRY(check_against());
    sort_by_severity(report_.findings);
    report_.looked_at = count_of(static_cast<Index>(catalog().tensors().size()), "tensor") + " looked at";
    report_.how = read_bytes_ ? "all data read" : "headers only";
    report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options_.findings.json)
      print_json(threshold);
    else
      print_text();
    return conclude(report_, options_.findings);
  }

 private:
  const Catalog& catalog() const { return open_.reader->catalog(); }
  const LayoutDescriptor* source_layout() const { return source_layout_ ? &*source_layout_ : nullptr; }
  void fact(std::string label, std::string text) { facts_.emplace_back(std::move(label), std::move(text)); }
  void add(std::vector<Finding> findings) {
    for (Finding& f : findings) report_.findings.push_back(std::move(f));
  }
  Finding& add(Severity severity, std::string id, std::string what) {
    report_.findings.push_back({severity, std::move(id), {}, std::move(what), {}, "", ""});
    return report_.findings.back();
  }
  void checked(std::string id, std::string title, Index looked_at) {
    report_.checks.push_back({std::move(id), std::move(title), looked_at, ""});
  }
  void skipped(std::string id, std::string title, std::string why) {
    report_.checks.push_back({std::move(id), std::move(title), 0, std::move(why)});
  }

  // ---- what there is

  // A checkpoint whose files do not fit its metadata is opened all the same, to say all that is wrong with it.
  Status open() {
    source_layout_ = TRY(options_.source_layout.load());
    auto opened = open_checkpoint(options_.path, {.files_too = true, .validated = false, .layout = source_layout()});
    if (!opened) {
      auto again = open_checkpoint(options_.path, {.files_too = false, .validated = false, .layout = source_layout()});
      if (!again) return std::move(opened).error();
      refusal_ = opened.error().message();
      opened = std::move(again);
    }
    open_ = *std::move(opened);
    return {};
  }

  // The config that was given, or the one that lies beside the checkpoint: that one may be of a model reshard does not
  // know.
  Status read_model_config() {
    const auto choice = TRY(options_.model.choice());
    const std::string path = find_config(options_.path, options_.model.config);
    if (!path.empty()) {
      auto config = read_config(path);
      if (!config && !options_.model.config.empty()) return std::move(config).error();
      if (config) config_ = *std::move(config);
    }
    if (!choice.detect) {
      family_ = choice.family;
    } else if (config_) {
      family_ = family_of_model_type(config_->model_type);
    } else if (const auto detected = detect_family(catalog())) {
      family_ = detected->family;
    }
    if (family_ && !detect_convention(*family_, catalog())) family_ = nullptr;
    return {};
  }

  // ---- metadata

  void check_structure() {
    StructureAudit audit = audit_structure(*open_.reader, run_.threads, temporary_directory());
    metadata_only_ = audit.metadata_only;
    is_readable_ = audit.is_readable && !metadata_only_;
    const auto tensors = static_cast<Index>(catalog().tensors().size());
    const auto files = static_cast<Index>(catalog().files.size());
    Index pieces = 0;
    for (const Tensor& t : catalog().tensors()) pieces += static_cast<Index>(t.fragments.size());
    if (audit.findings.empty() && !refusal_.empty()) {
      add(Severity::kError, "reader", refusal_);
      is_readable_ = false;
    }
    checked("cover", "every element is stored exactly once", tensors);
    if (audit.metadata_only)
      skipped("file", "every file is there and long enough", "no data file is here, only metadata");
    else
      checked("file", "every file is there and long enough", files);
    checked("shared-bytes", "no two pieces claim the same bytes", pieces);
    if (audit.headers_read)
      checked("header", "what is stored is what the metadata say", pieces);
    else
      skipped("header", "what is stored is what the metadata say", "the headers around the pieces were not read");
    checked("stale-files", "every file belongs to the checkpoint", files);
    checked("unclaimed-bytes", "every byte of a data file belongs to a tensor or object", files);
    checked("key-path", "names and paths in the state_dict agree", tensors);
    checked("reader", "nothing is odd about the files", files);
    const bool covers =
        std::none_of(audit.findings.begin(), audit.findings.end(), [](const Finding& f) { return f.id == "cover"; });
    if (covers)
      fact("cover", "every element of " + count_of(tensors, "tensor") + " is stored exactly once, in " +
                        count_of(pieces, "piece"));
    if (audit.metadata_only) fact("files", "none of the " + count_of(files, "data file") + " is here: metadata only");
    add(std::move(audit.findings));
  }

  Status check_model() {
    const bool wanted = !options_.model.config.empty();
    if (!config_ || !family_) {
      if (wanted)
        return unsupported(options_.path + ": " +
                           (family_of_model_type(config_->model_type)
                                ? "no tensor is named as a parameter of the model that --config describes"
                                : "model_type '" + printable(config_->model_type) + "' of " + config_->path +
                                      " belongs to no family that reshard knows"));
      skipped("shape", "every shape is as the config says", "no config.json of a known family");
      return {};
    }
    auto audit = audit_model(catalog(), *family_, *config_);
    if (!audit) {
      if (wanted) return std::move(audit).error();
      skipped("shape", "every shape is as the config says", audit.error().message());
      return {};
    }
    const Index n = audit->expected_tensors;
    checked("vocabulary", "embedding and head have a row for each word", n);
    checked("shape", "every shape is as the config says", n);
    checked("missing", "every tensor of the model is there", n);
    checked("extra", "no tensor is there that the model has not", audit->looked_at);
    checked("name", "every name is known, and none twice", audit->looked_at);
    checked("dtype", "every dtype is as the config says", n);
    checked("optimizer", "optimizer state fits its parameters", n);
    std::string text = config_->path + ": " + std::string(family_->title) + ", " + count_of(n, "tensor") + ", " +
                       count_of(audit->expected_elements, "parameter");
    if (audit->head_is_tied) text += "; the head is tied to the embedding and not stored";
    if (!audit->uniform_dtype.empty()) text += "; kept in " + audit->uniform_dtype + ", for use in " + config_->dtype;
    fact("config", text);
    add(std::move(audit->findings));
    return {};
  }

  Status check_mesh() {
    if (options_.layout.empty() && options_.mesh.empty()) return {};
    DeclaredLayout declared;
    LayoutDescriptor layout;
    std::optional<Placer> placer;
    Index layers = config_ ? config_->num_hidden_layers() : 0;
    for (const Tensor& t : catalog().tensors())
      if (!config_) layers = std::max(layers, layer_number(t.name) + 1);
    if (!options_.layout.empty()) {
      layout = TRY(load_layout(options_.layout, options_.mesh));
      if (!layout.mesh && layout.stored_as != StoredAs::kWhole)
        return usage_error("layout " + options_.layout + " has no mesh of its own; give one with --mesh");
      declared.title = "layout " + layout.name + (layout.mesh ? " (" + layout.mesh->to_string() + ")" : "");
      declared.mesh = layout.mesh.value_or(Mesh());
      declared.stages_are_exact = layout.pipeline.has_value();
      declared.stored_whole = layout.stored_as == StoredAs::kWhole;
      declared.place = [&, layers](const Tensor& t) { return layout.place_in_files(t.name, t.shape, layers); };
      check_declared_vocabulary(layout);
    } else {
      declared.mesh = TRY(Mesh::parse(options_.mesh));
      declared.title = declared.mesh.to_string();
      placer = TRY(Placer::make(declared.mesh, family_, config_ ? &*config_ : nullptr, catalog()));
      declared.place = [&](const Tensor& t) -> Result<Placement> { return placer->place(t); };
    }
    MeshAudit audit = audit_mesh(catalog(), declared, infer_mesh(catalog()));
    if (audit.tensors == 0 && !options_.layout.empty())
      return usage_error("layout " + options_.layout + ": no pattern matches a tensor of " + options_.path);
    const bool leaves_no_trace = open_.format->holds_whole_tensors() && !declared.stored_whole;
    checked("layout", "every tensor is cut as declared", audit.tensors);
    checked("world-size", "the files are of as many ranks as declared", declared.mesh.ranks());
    checked("stages", "every pipeline stage wrote its layers", declared.mesh.size("pp"));
    if (audit.writers_compared)
      checked("ranks", "every rank wrote what it holds", declared.mesh.ranks());
    else
      skipped("ranks", "every rank wrote what it holds", "file names do not tell who wrote them");
    if (audit.findings.empty())
      fact("layout", declared.title + ": " + count_of(audit.tensors, "tensor") + " in " +
                         count_of(audit.pieces, "piece") + " are cut so");
    if (audit.not_placed > 0)
      fact("", count_of(audit.not_placed, "tensor") + " the layout says nothing of were not looked at");
    if (leaves_no_trace && declared.mesh.ranks() > 1)
      add(Severity::kNote, "layout-gathered-format",
          "Hugging Face files hold whole tensors: the mesh that trained them leaves no trace");
    else
      add(std::move(audit.findings));
    return {};
  }

  // A declared vocabulary: its rows are the true ones or the padded ones.
  void check_declared_vocabulary(const LayoutDescriptor& layout) {
    if (!layout.vocabulary || !(layout.vocabulary->size || layout.vocabulary->padded_size)) return;
    const Vocabulary& v = *layout.vocabulary;
    checked("declared-vocabulary", "embedding and head have the rows that the layout declares", 0);
    for (const Tensor& t : catalog().tensors()) {
      if (t.shape.rank() == 0 || split_state_key(t.name).kind != StateKind::kModel ||
          !any_glob_matches(v.tensors, t.name))
        continue;
      ++report_.checks.back().looked_at;
      const auto padded = v.padded_size ? Result<Index>(*v.padded_size) : layout.padded_rows(v.size.value_or(0));
      if ((v.size && t.shape[0] == *v.size) || (padded && t.shape[0] == *padded)) continue;
      Finding& f = add(Severity::kError, "declared-vocabulary",
                       with_commas(t.shape[0]) + " rows, which layout " + layout.name + " does not declare");
      f.tensors = {t.name};
      f.why.push_back("declared: " + (v.size ? with_commas(*v.size) + " true rows" : std::string("no true size")) +
                      (padded ? ", " + with_commas(*padded) + " with padding" : ""));
    }
  }

  // ---- data

  Status check_bytes() {
    if (!options_.reads_bytes()) {
      skipped("bytes", "checksums hold and digests are as recorded",
              "only metadata were asked about; --bytes reads all");
      return {};
    }
    if (metadata_only_ && (options_.bytes || options_.values || options_.replicas))
      add(Severity::kError, "file-missing", "no data file is here: there is nothing to read");
    if (!is_readable_) {
      skipped("bytes", "checksums hold and digests are as recorded", "the data cannot be read as the metadata say");
      return {};
    }
    read_bytes_ = true;
    checked("bytes", "checksums hold and digests are as recorded", static_cast<Index>(catalog().tensors().size()));
    Status read = read_everything();
    if (read || read.error().code() != ErrorCode::kCorrupt) return read;
    Finding& f = add(Severity::kError, "bytes-damaged", read.error().message());
    f.advice = "The reading ended there. Take this file from another copy of the checkpoint.";
    return {};
  }

  Status read_everything() {
    Reader& reader = *open_.reader;
    std::vector<std::size_t> all;
    for (std::size_t i = 0; i < catalog().tensors().size(); ++i) all.push_back(i);
    TRY(reader.locate(all, run_.threads, temporary_directory()));
    Json manifest;
    const std::string manifest_path = path_join(options_.path, "reshard_manifest.json");
    Catalog view = catalog();
    const bool has_side_files = is_directory(options_.path) || open_.format->is_file;
    const auto text = has_side_files ? TRY(reader.side_file("reshard_manifest.json", kMaxManifestBytes)) : std::nullopt;
    if (text) {
      manifest = TRY(parse_json(*text, manifest_path));
      view = TRY(manifest_view(manifest, catalog(), config_).context(manifest_path));
    }
    TRY(read_tensors(view));
    for (const Blob& blob : catalog().blobs) TRY(reader.blob_bytes(blob));  // checks them
    fact("bytes", checksums_ > 0 ? count_of(checksums_, "CRC-32 sum") + " recorded, all hold"
                                 : std::string("read to the end; the format records no checksums"));
    if (!manifest.is_null()) TRY(compare_manifest(manifest, manifest_path, view));
    check_tied_head(view);
    if (options_.replicas) TRY(check_replicas());
    return {};
  }

  Status read_tensors(const Catalog& view) {
    Progress progress("reading", view.tensor_bytes(), options_.resources.quiet || options_.findings.json);
    RunOptions run = run_;
    run.progress = [&](Index done) { progress.update(done); };
    if (options_.values) {
      ValueReport values = TRY(check_values(view, open_.reader->files(), value_context(view), run));
      proofs_ = std::move(values.proofs);
      checksums_ = values.checksums_checked;
      const auto n = static_cast<Index>(values.tensors.size());
      for (const auto& [id, title] :
           {std::pair("non-finite", "no NaN and no infinity"), std::pair("zero", "no weights and no rows are all zero"),
            std::pair("constant", "no weights and no rows are all the same"),
            std::pair("unused-tokens", "every word was trained"),
            std::pair("padding-rows", "no rows are there for padding alone"),
            std::pair("near-overflow", "no value is near its type's end"),
            std::pair("large-values", "no weight is absurdly large")})
        checked(id, title, n);
      values_ = std::move(values.tensors);
      add(std::move(values.findings));
    } else {
      FileSource source(view, open_.reader->files());
      std::vector<DigestRequest> requests;
      for (std::size_t i = 0; i < view.tensors().size(); ++i) requests.push_back({i, view.tensors()[i].dtype});
      proofs_ = TRY(digest_tensors(requests, source, run));
      checksums_ = source.checksums_checked();
    }
    for (std::size_t i = 0; i < view.tensors().size(); ++i) tensor_json(view.tensors()[i], i);
    return {};
  }

  ValueContext value_context(const Catalog& view) const {
    ValueContext context;
    context.vocab_size = config_ ? config_->vocab_size() : 0;
    for (const Tensor& t : view.tensors()) {
      const StateKey key = split_state_key(t.name);
      const auto parsed = family_ && !key.parameter.empty() ? parse_name(*family_, key.parameter) : std::nullopt;
      if (parsed && parsed->rule->is_vocabulary()) context.vocabulary.push_back(t.name);
    }
    return context;
  }

  void tensor_json(const Tensor& t, std::size_t i) {
    Json entry = Json::object();
    entry.set("name", valid_utf8(t.name)).set("dtype", info(t.dtype).torch_name).set("shape", shape_json(t.shape));
    entry.set("digest", proofs_[i].source.hex());
    if (options_.values) {
      const TensorHealth& h = values_[i].health;
      entry.set("absmax", h.absmax).set("nan", h.nans).set("inf", h.infs).set("zeros", h.zeros);
    }
    tensors_.push_back(std::move(entry));
  }

  Status compare_manifest(const Json& manifest, const std::string& path, const Catalog& view) {
    checked("manifest", "digests are as reshard_manifest.json says", static_cast<Index>(view.tensors().size()));
    const Json* recorded = manifest.find("tensors");
    if (!recorded || !recorded->is_object()) return corrupt(path + ": expected an object 'tensors'");
    std::vector<std::string> differing, unknown, absent;
    for (std::size_t i = 0; i < view.tensors().size(); ++i) {
      const std::string& name = view.tensors()[i].name;
      const Json* entry = recorded->find(name);
      if (!entry)
        unknown.push_back(name);
      else if (TRY(entry->get_string("digest").context(path)) != proofs_[i].source.hex())
        differing.push_back(name);
    }
    for (const auto& member : TRY(recorded->as_object()))
      if (!view.find(member.key)) absent.push_back(member.key);
    if (differing.empty() && unknown.empty() && absent.empty())
      fact("manifest", count_of(static_cast<Index>(proofs_.size()), "digest") + " as reshard_manifest.json says");
    const auto report = [&](std::vector<std::string> names, std::string id, std::string what) {
      if (!names.empty()) add(Severity::kError, std::move(id), std::move(what)).tensors = std::move(names);
    };
    report(std::move(differing), "manifest-digest", "the digest differs from reshard_manifest.json");
    report(std::move(unknown), "manifest-unknown", "not in reshard_manifest.json");
    report(std::move(absent), "manifest-absent", "in reshard_manifest.json only");
    return {};
  }

  // A head that is stored although the config ties it has to equal the embedding: loaders take one of the two.
  void check_tied_head(const Catalog& view) {
    if (!config_ || !family_ || !config_->tie_word_embeddings()) return;
    for (std::size_t i = 0; i < view.tensors().size(); ++i) {
      const Tensor& head = view.tensors()[i];
      const auto parsed = parse_name(*family_, head.name);
      if (!parsed || parsed->rule->tied_to.empty()) continue;
      for (std::size_t k = 0; k < view.tensors().size(); ++k) {
        if (canonical_key(*family_, view.tensors()[k].name) != parsed->rule->tied_to) continue;
        if (view.tensors()[k].dtype != head.dtype || proofs_[k].source == proofs_[i].source) continue;
        Finding& f =
            add(Severity::kError, "tied-differ", "differs from the embedding that " + config_->path + " ties it to");
        f.tensors = {head.name};
        f.advice = "A loader keeps the embedding and drops the head: set tie_word_embeddings to false to keep both.";
      }
    }
  }

  Status check_replicas() {
    ReplicaReport replicas = TRY(compare_replicas(catalog(), open_.reader->files(), run_));
    checked("replicas", "all copies of a piece are equal", replicas.copies);
    fact("replicas", replicas.copies == 0
                         ? std::string("the checkpoint stores every piece once; there is nothing to compare")
                         : with_commas(replicas.copies) + (replicas.copies == 1 ? " further copy" : " further copies") +
                               " of " + count_of(replicas.tensors, "tensor") + " (" + human_bytes(replicas.bytes) +
                               ") compared");
    add(std::move(replicas.findings));
    return {};
  }

  // ---- another checkpoint

  Status check_against() {
    if (options_.against.empty()) return {};
    if (!is_readable_) {
      skipped("against", "equal to " + options_.against, "the data cannot be read as the metadata say");
      return {};
    }
    other_ = TRY(open_checkpoint(options_.against, {.layout = source_layout()}));
    const auto c = TRY(compare(open_, other_, options_.model, options_.path, options_.against, options_.resources));
    checked("against", "equal to " + options_.against, static_cast<Index>(c->pairs().size()));
    read_bytes_ = true;
    for (std::string& d : structural_differences(*c)) add(Severity::kError, "against-structure", std::move(d));
    std::vector<Comparison::Digests> digests;
    {
      Progress progress("reading", c->bytes(), options_.resources.quiet || options_.findings.json);
      c->set_progress([&](Index done) { progress.update(done); });
      digests = TRY(c->digests());
    }
    Index equal = 0, converted = 0;
    Json list = Json::array();
    std::vector<std::string> differing;
    for (std::size_t i = 0; i < digests.size(); ++i) {
      const Tensor &a = c->a().tensors()[c->pairs()[i].a], &b = c->b().tensors()[c->pairs()[i].b];
      const bool same = digests[i].a == digests[i].b;
      list.push_back(Json::object()
                         .set("name", valid_utf8(a.name))
                         .set("dtype", info(a.dtype).torch_name)
                         .set("shape", shape_json(a.shape))
                         .set("digest", digests[i].a_as_stored.hex())
                         .set("against_dtype", info(b.dtype).torch_name)
                         .set("against_digest", digests[i].b.hex())
                         .set("equal", same));
      if (!same) differing.push_back(a.name);
      equal += same;
      converted += same && a.dtype != b.dtype;
    }
    tensors_ = std::move(list);
    if (!differing.empty())
      add(Severity::kError, "against-values", "values differ; reshard diff tells by how much").tensors =
          std::move(differing);
    for (const std::string& name : TRY(c->differing_objects()))
      add(Severity::kError, "against-object", "object '" + printable(name) + "' differs");
    if (options_.bytes || options_.values || options_.replicas) {
      // Said by check_bytes.
    } else {
      fact("bytes", c->checksums_checked() > 0 ? count_of(c->checksums_checked(), "CRC-32 sum") + " recorded, all hold"
                                               : std::string("read to the end; the formats record no checksums"));
    }
    fact("equal",
         with_commas(equal) + " of " + count_of(static_cast<Index>(digests.size()), "tensor") + ", digest for digest" +
             (converted > 0 ? ", " + with_commas(converted) + " of them after conversion to the other's dtype" : ""));
    for (const std::string& text : c->not_compared()) fact("not seen", text);
    return {};
  }

  // ---- what is said

  void print_text() const {
    if (!options_.resources.quiet || !report_.findings.empty()) {
      print_row("verify", options_.path + "   " + std::string(open_.format->title) + "   " +
                              human_bytes(catalog().tensor_bytes()) +
                              (options_.against.empty() ? "" : "   against " + options_.against));
      for (const auto& [label, text] : facts_) print_row(label, text);
      print_values();
    }
    print_findings(report_, options_.limit);
    if (!options_.resources.quiet || !report_.findings.empty()) print_summary(report_);
  }

  // The tensors with the largest values.
  void print_values() const {
    if (values_.empty()) return;
    std::vector<const ValueRow*> rows;
    for (const ValueRow& r : values_) rows.push_back(&r);
    std::stable_sort(rows.begin(), rows.end(),
                     [](const ValueRow* a, const ValueRow* b) { return a->health.absmax > b->health.absmax; });
    std::printf("\n%s  %s  %s  %s  %s\n", padded("largest values", 56).c_str(), "    absmax", "zeros", "       nan",
                "       inf");
    for (std::size_t i = 0; i < std::min({rows.size(), kShownValues, options_.limit}); ++i) {
      const ValueRow& r = *rows[i];
      std::printf("%s  %10.4g  %4.1f%%  %10s  %10s\n", padded(printable(r.name), 56).c_str(), r.health.absmax,
                  r.zero_percent(), with_commas(r.health.nans).c_str(), with_commas(r.health.infs).c_str());
    }
    if (rows.size() > std::min(kShownValues, options_.limit))
      std::printf("and %s more (--json has all)\n",
                  with_commas(static_cast<Index>(rows.size() - std::min(kShownValues, options_.limit))).c_str());
    std::printf("\n");
  }

  void print_json(Severity threshold) {
    Json facts = Json::object();
    for (const auto& [label, text] : facts_)
      if (!label.empty()) facts.set(label, valid_utf8(text));
    Json json = Json::object();
    json.set("path", valid_utf8(options_.path)).set("format", open_.format->name);
    if (!options_.against.empty()) json.set("against", valid_utf8(options_.against));
    json.set("config", config_ && family_ ? Json(valid_utf8(config_->path)) : Json());
    json.set("family", family_ ? Json(family_->name) : Json());
    json.set("facts", std::move(facts));
    add_findings(json, report_, threshold);
    json.set("tensors", std::move(tensors_));
    std::printf("%s\n", to_text(json, 1).c_str());
  }

  const VerifyOptions& options_;
  RunOptions run_;
  OpenCheckpoint open_, other_;
  std::string refusal_;  // why the reader would not have it, where it was opened all the same
  std::optional<ModelConfig> config_;
  const Family* family_ = nullptr;
  std::optional<LayoutDescriptor> source_layout_;
  bool metadata_only_ = false, is_readable_ = true, read_bytes_ = false;
  Index checksums_ = 0;
  std::vector<TensorProof> proofs_;
  std::vector<ValueRow> values_;
  Json tensors_ = Json::array();
  std::vector<std::pair<std::string, std::string>> facts_;
  AuditReport report_;
};

Result<int> verify(const VerifyOptions& options) {
  return Verification(options, TRY(options.resources.run_options())).run();
}

}  // namespace

void add_verify(CommandLine& line) {
  auto options = std::make_shared<VerifyOptions>();
  line.add_option("PATH", options->path, "The checkpoint").required();
  options->model.add(line);
  line.add_option("--layout", options->layout, "The layout it was saved in: a file (reshard layout) or a built-in");
  line.add_option("--mesh", options->mesh, "The mesh it was saved by, e.g. dp_replicate=2,dp_shard=8");
  line.add_option("--against", options->against, "Another checkpoint of the same model, of any format and layout");
  line.add_flag("--bytes", options->bytes, "Read all data: checksums, digests (default where nothing else is asked)");
  line.add_flag("--values", options->values, "Look for NaN, infinities, zero and constant rows while reading");
  line.add_flag("--replicas", options->replicas, "Read and compare every stored copy of a piece");
  line.add_option("--limit", options->limit, "Findings and tensors on the screen; --json has all").shows_default();
  options->source_layout.add(line);
  options->findings.add(line);
  options->resources.add(line);
  line.footer(
      "Examples:\n"
      "  reshard verify model --config config.json                  names, shapes, dtypes; headers only\n"
      "  reshard verify step-1000 --mesh dp_replicate=2,dp_shard=8   is it the layout that was configured?\n"
      "  reshard verify step-1000 --values                          checksums, NaN, dead rows\n"
      "  reshard verify step-1000 --against model                   equal, although one is DCP and the other is not\n"
      "A config.json beside the checkpoint is used unless another is given. Without --config, --layout, --mesh or\n"
      "--against everything is read. Exit code 0 only when there is nothing to say, 1 with findings.");
  line.action([options] { return verify(*options); });
}

}  // namespace reshard::tools
