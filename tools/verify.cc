// reshard verify: cover, checksums and digests of a checkpoint, by itself or against another.
#include <cstdio>

#include "lib/base/text.h"
#include "tools/commands.h"
#include "tools/comparing.h"
#include "tools/job_options.h"

namespace reshard::tools {
namespace {

constexpr std::size_t kShown = 20;  // findings of one kind on the screen; --json has all
constexpr Index kMaxManifestBytes = Index{1} << 30;

struct VerifyOptions {
  std::string path, against;
  bool json = false;
  ModelOptions model;
  ResourceOptions resources;
};

// What a verification found. Errors of reading are not findings: they end it.
struct Findings {
  Json tensors = Json::array();
  std::vector<std::string> differences;  // whole sentences
  std::vector<std::pair<std::string, std::string>> rows;
};

// The view under which a manifest's digests were taken.
Result<Catalog> manifest_view(const Json& manifest, const Catalog& native, const std::string& config_path) {
  const Json* family_name = manifest.find("family");
  if (!family_name || family_name->is_null()) return native;
  for (const Family* family : families()) {
    if (family->name != TRY(family_name->as_string())) continue;
    std::optional<ModelConfig> config;
    if (!config_path.empty()) config = TRY(read_config(config_path));
    if (config) config->set("tie_word_embeddings", 0);  // what is not stored has no digest
    return canonical_view(native, {family, config ? &*config : nullptr, TRY(manifest.get_bool("hf_rows")), true},
                          nullptr);
  }
  return unsupported("reshard_manifest.json names a family this version does not know");
}

// Digests of everything in one checkpoint, and their agreement with its manifest if it has one.
Status verify_alone(const VerifyOptions& options, OpenCheckpoint& open, Findings& findings) {
  Reader& reader = *open.reader;
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < reader.catalog().tensors().size(); ++i) all.push_back(i);
  RunOptions run = TRY(options.resources.run_options());
  TRY(reader.locate(all, run.threads, temporary_directory()));
  TRY(validate(reader.catalog()));
  findings.rows.emplace_back(
      "cover", "every element of " + count_of(static_cast<Index>(all.size()), "tensor") + " is stored exactly once");

  Json manifest;
  const std::string manifest_path = path_join(options.path, "reshard_manifest.json");
  const std::string config_path = find_config(options.path, options.model.config);
  Catalog view = reader.catalog();
  if (is_directory(options.path) && path_exists(manifest_path)) {
    manifest = TRY(parse_json(TRY(read_whole_file(manifest_path, kMaxManifestBytes)), manifest_path));
    view = TRY(manifest_view(manifest, reader.catalog(), config_path).context(manifest_path));
  }
  FileSource source(view, reader.files());
  std::vector<DigestRequest> requests;
  for (std::size_t i = 0; i < view.tensors().size(); ++i) requests.push_back({i, view.tensors()[i].dtype});
  std::vector<TensorProof> proofs;
  {
    Progress progress("reading", view.tensor_bytes(), options.resources.quiet || options.json);
    run.progress = [&](Index done) { progress.update(done); };
    proofs = TRY(digest_tensors(requests, source, run));
  }
  findings.rows.emplace_back("bytes", source.checksums_checked() > 0
                                          ? count_of(source.checksums_checked(), "CRC-32 sum") + " recorded, all hold"
                                          : std::string("read to the end; the format records no checksums"));
  for (const Blob& blob : reader.catalog().blobs) TRY(reader.blob_bytes(blob));  // checks them
  for (std::size_t i = 0; i < view.tensors().size(); ++i) {
    const Tensor& t = view.tensors()[i];
    findings.tensors.push_back(Json::object()
                                   .set("name", t.name)
                                   .set("dtype", info(t.dtype).torch_name)
                                   .set("shape", shape_json(t.shape))
                                   .set("digest", proofs[i].source.hex()));
  }
  if (manifest.is_null()) return {};

  const Json* recorded = manifest.find("tensors");
  if (!recorded || !recorded->is_object()) return corrupt(manifest_path + ": expected an object 'tensors'");
  const std::size_t before = findings.differences.size();
  for (std::size_t i = 0; i < view.tensors().size(); ++i) {
    const std::string& name = view.tensors()[i].name;
    const Json* entry = recorded->find(name);
    if (!entry)
      findings.differences.push_back("tensor '" + printable(name) + "' is not in reshard_manifest.json");
    else if (TRY(entry->get_string("digest").context(manifest_path)) != proofs[i].source.hex())
      findings.differences.push_back("tensor '" + printable(name) + "': the digest differs from reshard_manifest.json");
  }
  for (const auto& member : TRY(recorded->as_object()))
    if (!view.find(member.key))
      findings.differences.push_back("tensor '" + printable(member.key) + "' is in reshard_manifest.json only");
  if (findings.differences.size() == before)
    findings.rows.emplace_back(
        "manifest", count_of(static_cast<Index>(proofs.size()), "digest") + " as reshard_manifest.json says");
  return {};
}

Status verify_config(const VerifyOptions& options, const Catalog& native, Findings& findings) {
  const auto choice = TRY(options.model.choice());
  if (options.model.config.empty()) return {};
  const auto detected = detect_family(native);
  if (!detected || (!choice.detect && choice.family != detected->family))
    return unsupported(options.path + ": the tensors' names belong to no family that --config could be held against");
  const ModelConfig config = TRY(read_config(options.model.config));
  const auto view = canonical_view(native, {detected->family, &config, false, true}, nullptr);
  const Status fits = view ? check_against_config(*view, *detected->family, config, true) : Status(view.error());
  if (!fits)
    findings.differences.push_back(fits.error().message());
  else
    findings.rows.emplace_back("config", "every shape is as " + options.model.config + " says");
  return {};
}

Status verify_against(const VerifyOptions& options, OpenCheckpoint& a, OpenCheckpoint& b, Findings& findings) {
  const auto c = TRY(compare(a, b, options.model, options.path, options.against, options.resources));
  for (std::string& d : structural_differences(*c)) findings.differences.push_back(std::move(d));
  std::vector<Comparison::Digests> digests;
  {
    Progress progress("reading", c->bytes(), options.resources.quiet || options.json);
    c->set_progress([&](Index done) { progress.update(done); });
    digests = TRY(c->digests());
  }
  Index equal = 0, converted = 0;
  for (std::size_t i = 0; i < digests.size(); ++i) {
    const Tensor &ta = c->a().tensors()[c->pairs()[i].a], &tb = c->b().tensors()[c->pairs()[i].b];
    const bool same = digests[i].a == digests[i].b;
    findings.tensors.push_back(Json::object()
                                   .set("name", ta.name)
                                   .set("dtype", info(ta.dtype).torch_name)
                                   .set("shape", shape_json(ta.shape))
                                   .set("digest", digests[i].a_as_stored.hex())
                                   .set("against_dtype", info(tb.dtype).torch_name)
                                   .set("against_digest", digests[i].b.hex())
                                   .set("equal", same));
    if (!same) {
      findings.differences.push_back("tensor '" + printable(ta.name) + "' differs");
      continue;
    }
    ++equal;
    if (ta.dtype != tb.dtype) ++converted;
  }
  for (const std::string& name : TRY(c->differing_objects()))
    findings.differences.push_back("object '" + printable(name) + "' differs");
  findings.rows.emplace_back("cover", "on both sides every element is stored exactly once");
  findings.rows.emplace_back("bytes", c->checksums_checked() > 0
                                          ? count_of(c->checksums_checked(), "CRC-32 sum") + " recorded, all hold"
                                          : std::string("read to the end; the formats record no checksums"));
  findings.rows.emplace_back(
      "equal",
      with_commas(equal) + " of " + count_of(static_cast<Index>(digests.size()), "tensor") + ", digest for digest" +
          (converted > 0 ? ", " + with_commas(converted) + " of them after conversion to the other's dtype" : ""));
  for (const std::string& text : c->not_compared()) findings.rows.emplace_back("not seen", text);
  return {};
}

int report(const VerifyOptions& options, const OpenCheckpoint& open, const Findings& findings) {
  const bool good = findings.differences.empty();
  if (options.json) {
    Json differences = Json::array();
    for (const std::string& d : findings.differences) differences.push_back(d);
    Json json = Json::object();
    json.set("path", options.path).set("format", open.format->name);
    if (!options.against.empty()) json.set("against", options.against);
    Json facts = Json::object();
    for (const auto& [label, text] : findings.rows) facts.set(label, text);
    json.set("ok", good).set("facts", std::move(facts)).set("differences", std::move(differences));
    json.set("tensors", findings.tensors);
    std::printf("%s\n", to_text(json, 1).c_str());
    return good ? 0 : 1;
  }
  if (!options.resources.quiet || !good) {
    print_row("verify", options.path + "   " + std::string(open.format->title) + "   " +
                            human_bytes(open.reader->catalog().tensor_bytes()) +
                            (options.against.empty() ? "" : "   against " + options.against));
    for (const auto& [label, text] : findings.rows) print_row(label, text);
    for (const std::string& w : open.reader->catalog().warnings) print_row("warning", w);
  }
  for (std::size_t i = 0; i < std::min(findings.differences.size(), kShown); ++i)
    print_row("error", findings.differences[i]);
  if (findings.differences.size() > kShown)
    print_row(
        "", "and " + with_commas(static_cast<Index>(findings.differences.size() - kShown)) + " more (--json has all)");
  if (!options.resources.quiet || !good)
    print_row("result", good ? "good" : count_of(static_cast<Index>(findings.differences.size()), "difference"));
  return good ? 0 : 1;
}

Result<int> verify(const VerifyOptions& options) {
  OpenCheckpoint open = TRY(open_checkpoint(options.path));
  Findings findings;
  if (options.against.empty()) {
    TRY(verify_alone(options, open, findings));
  } else {
    OpenCheckpoint other = TRY(open_checkpoint(options.against));
    TRY(verify_against(options, open, other, findings));
  }
  TRY(verify_config(options, open.reader->catalog(), findings));
  return report(options, open, findings);
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  auto options = std::make_shared<VerifyOptions>();
  app.add_option("PATH", options->path, "The checkpoint")->required();
  app.add_option("--against", options->against, "Another checkpoint of the same model, of any format and layout");
  app.add_flag("--json", options->json, "Print the result as JSON, with every tensor's digest");
  options->model.add(app);
  options->resources.add(app);
  app.footer(
      "Examples:\n"
      "  reshard verify step-1000                        cover, checksums, digests (and the manifest, if reshard wrote "
      "it)\n"
      "  reshard verify step-1000 --against model        equal, although one is DCP and the other Hugging Face\n"
      "  reshard verify model --config config.json       every shape as the config says\n"
      "Exit code 1 when something differs, 3 when the bytes are damaged.");
  app.callback([options, &action] { action = [options] { return verify(*options); }; });
}

}  // namespace reshard::tools
