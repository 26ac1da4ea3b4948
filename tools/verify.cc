// SPDX-License-Identifier: Apache-2.0
// reshard verify: checks a checkpoint against its config, a mesh or layout, its checksums, or another checkpoint.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <map>

#include "formats/object_values.h"
#include "formats/registry.h"
#include "lib/audit/verification.h"
#include "lib/base/text.h"
#include "lib/convert/lineage.h"
#include "tools/commands.h"
#include "tools/findings_report.h"
#include "tools/html_report.h"
#include "tools/job.h"
#include "tools/job_options.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

constexpr std::size_t kShownValues = 20;

struct Options {
  std::string path, against, layout, mesh;
  bool bytes = false, values = false, replicas = false, lineage = false, sums = false;
  std::vector<std::string> moved;  // NAME=DIR
  std::size_t limit = 20;
  SourceOptions source_layout;
  ModelOptions model;
  ResourceOptions resources;
  FindingsOptions findings;
};

Result<VerifyOptions> verify_options(const Options& options) {
  if (!options.moved.empty() && !options.lineage) return usage_error("--source needs --lineage");
  VerifyOptions o;
  o.path = options.path;
  o.model = TRY(options.model.choice());
  o.config = options.model.config;
  o.source_layout = TRY(options.source_layout.load());
  o.keys = TRY(options.source_layout.keys());
  o.weights = TRY(options.source_layout.which_weights());
  if (!options.layout.empty()) {
    o.layout = TRY(load_layout(options.layout, options.mesh));
    if (!o.layout->mesh && o.layout->stored_as != StoredAs::kWhole)
      return usage_error("layout " + options.layout + " has no mesh; add --mesh");
  } else if (!options.mesh.empty()) {
    o.mesh = TRY(Mesh::parse(options.mesh));
  }
  o.against = options.against;
  o.bytes = options.bytes;
  o.values = options.values;
  o.exponents = options.findings.json || !options.findings.html.empty();  // too long for the text output
  o.replicas = options.replicas;
  o.file_sums = options.sums && leads();
  o.run = TRY(options.resources.run_options());
  o.spool = temporary_directory();
  o.same_value = have_same_value;
  o.watch = [quiet = options.resources.quiet || options.findings.json](Index bytes) {
    return [bar = std::make_shared<Progress>("reading", bytes, quiet)](Index done) { bar->update(done); };
  };
  return o;
}

void print_value(const ValueRow& r) {
  std::printf("%s  %10.4g  %4.1f%%  %10s  %10s\n", padded(printable(r.name), 56).c_str(), r.health.absmax,
              r.zero_percent(), with_commas(r.health.nans).c_str(), with_commas(r.health.infs).c_str());
}

void print_values_header(const char* title) {
  std::printf("\n%s  %s  %s  %s  %s\n", padded(title, 56).c_str(), "    absmax", "zeros", "       nan", "       inf");
}

// Prints the weights with the largest values, then one tensor for each kind of other state. Steps and moments differ by
// orders of magnitude and would hide the weights.
void print_values(const std::vector<ValueRow>& values, std::size_t limit) {
  if (values.empty()) return;
  std::vector<const ValueRow*> weights;
  std::map<std::string_view, const ValueRow*> others;
  for (const ValueRow& r : values) {
    if (r.kind == "weights") {
      weights.push_back(&r);
      continue;
    }
    const ValueRow*& largest = others[r.kind];
    if (!largest || r.health.absmax > largest->health.absmax) largest = &r;
  }
  std::stable_sort(weights.begin(), weights.end(),
                   [](const ValueRow* a, const ValueRow* b) { return a->health.absmax > b->health.absmax; });
  const std::size_t shown = std::min({weights.size(), kShownValues, limit});
  if (!weights.empty()) print_values_header("largest values");
  for (std::size_t i = 0; i < shown; ++i) print_value(*weights[i]);
  if (weights.size() > shown)
    std::printf("and %s more (--json has all)\n", with_commas(std::ssize(weights) - static_cast<Index>(shown)).c_str());
  if (!others.empty()) print_values_header("largest values of other state, by kind");
  for (const auto& [kind, row] : others) print_value(*row);
  std::printf("\n");
}

void print_text(const Options& options, const VerifyReport& verified, const AuditReport& audit) {
  const bool says_all = !options.resources.quiet;
  if (says_all) {
    print_row("verify", options.path + "   " + std::string(verified.format->title) + "   " +
                            human_bytes(verified.tensor_bytes) +
                            (options.against.empty() ? "" : "   against " + options.against));
    for (const auto& [label, text] : verified.facts) print_row(label, text);
    print_values(verified.values, options.limit);
    for (const FileSum& file : verified.files)
      std::printf("%s  %s\n", file.sha256.c_str(), printable(file.path).c_str());
  }
  print_findings(audit, options.limit);
  if (says_all) print_summary(audit);
}

Json tensors_json(const VerifyReport& verified) {
  Json out = Json::array();
  for (std::size_t i = 0; i < verified.tensors.size(); ++i) {
    const VerifiedTensor& t = verified.tensors[i];
    Json entry = Json::object();
    entry.set("name", t.name).set("dtype", info(t.dtype).torch_name).set("shape", dims_json(t.shape));
    entry.set("digest", t.digest.hex());
    if (t.against) {
      entry.set("against_dtype", info(t.against->dtype).torch_name).set("against_digest", t.against->digest.hex());
      entry.set("equal", t.against->equal);
    } else if (!verified.values.empty()) {
      const TensorHealth& h = verified.values[i].health;
      entry.set("kind", verified.values[i].kind)
          .set("absmax", h.absmax)
          .set("nan", h.nans)
          .set("inf", h.infs)
          .set("zeros", h.zeros);
      Json counts = Json::array();
      for (const Index n : h.exponents.counts) counts.push_back(n);
      if (!h.exponents.counts.empty())
        entry.set("exponents", Json::object().set("first", h.exponents.first).set("counts", std::move(counts)));
    }
    out.push_back(std::move(entry));
  }
  return out;
}

Json to_json(const Options& options, const VerifyReport& verified, const AuditReport& audit, Severity threshold) {
  Json facts = Json::object();
  for (const auto& [label, text] : verified.facts)
    if (!label.empty()) facts.set(label, text);
  Json json = answer_json("verify");
  json.set("path", options.path).set("format", verified.format->name);
  json.set("against", options.against.empty() ? Json() : Json(options.against));
  json.set("config", verified.model.config ? Json(verified.model.config->path) : Json());
  json.set("family", verified.model.family ? Json(verified.model.family->name) : Json());
  json.set("facts", std::move(facts));
  add_findings(json, audit, threshold);
  if (options.sums) {
    Json files = Json::array();
    for (const FileSum& file : verified.files)
      files.push_back(Json::object().set("path", file.path).set("sha256", file.sha256));
    json.set("files", std::move(files));
  }
  return json.set("tensors", tensors_json(verified));
}

// --lineage, --source
Result<Lineage> check_lineage(const Options& options, const VerifyOptions& wanted, const Opener& open) {
  const OpenCheckpoint merged = TRY(open(options.path, {.own_family = wanted.model.families.own()}));
  RecordedMerge merge = TRY(recorded_merge(*merged.reader));
  for (const std::string& text : options.moved) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos)
      return usage_error("--source '" + printable(text) + "': expected NAME=DIR, the new location of a source");
    TRY(merge.move(text.substr(0, equals), text.substr(equals + 1)));
  }
  return reshard::check_lineage(merge, open, *TRY(find_format(merge.to)), wanted.model, wanted.config, wanted.spool,
                                wanted.run);
}

Result<int> run(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const Severity threshold = TRY(options.findings.threshold());
  NotedInputs inputs;
  const VerifyOptions wanted = TRY(verify_options(options));
  VerifyReport verified = TRY(verify(inputs.opener(), wanted));
  AuditReport audit;
  audit.title = "reshard verify " + options.path;
  audit.findings = verified.findings;
  audit.checks = verified.checks;
  if (options.lineage) {
    Lineage lineage = TRY(check_lineage(options, wanted, inputs.opener()));
    if (lineage.findings.empty())
      verified.facts.emplace_back(
          "lineage", "merging the recorded sources again gives the same " + count_of(lineage.tensors, "tensor"));
    audit.checks.push_back({"lineage", "merging the sources again gives the same output", lineage.tensors, ""});
    std::move(lineage.findings.begin(), lineage.findings.end(), std::back_inserter(audit.findings));
  }
  if (leads())
    for (const std::string& report : {options.findings.html, options.findings.junit}) TRY(inputs.check(report));
  audit.looked_at = count_of(verified.tensor_count, "tensor") + " checked";
  audit.how = !verified.read_data ? "headers only" : verified.is_partial ? "readable data read" : "all data read";
  audit.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.findings.json)
    show_json(to_json(options, verified, audit, threshold), 1);
  else
    print_text(options, verified, audit);
  if (!options.findings.html.empty())
    TRY(write_html(options.findings.html, "verify", inputs.facts(), to_json(options, verified, audit, threshold)));
  return conclude(audit, options.findings);
}

}  // namespace

void add_verify(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_option("PATH", options->path, "Checkpoint to verify").read().required();
  options->model.add(line);
  line.group("Checks");
  line.add_option("--layout", options->layout, "Expected layout: a file (see: reshard layout) or a built-in layout")
      .completes(layout_names())
      .read();
  line.add_option("--mesh", options->mesh, "Expected mesh, e.g. dp_replicate=2,dp_shard=8").takes("MESH").common();
  line.add_option("--against", options->against, "Compare with another checkpoint of the same model, in any format")
      .common()
      .read()
      .takes("PATH");
  line.add_flag("--bytes", options->bytes, "Read all data and verify checksums (default without other checks)")
      .common();
  line.add_flag("--values", options->values, "Find NaN, infinities, zero and constant rows; implies --bytes").common();
  line.add_flag("--replicas", options->replicas, "Compare all stored copies of each shard; implies --bytes");
  line.add_flag("--sha256", options->sums, "Also list the SHA-256 of each file and the config, as sha256sum does");
  line.add_flag("--lineage", options->lineage, "Merge the sources of a merged checkpoint again and compare");
  line.add_option("--source", options->moved, "New location of a source, with --lineage").read().takes("NAME=DIR");
  line.group("Report");
  line.add_option("--limit", options->limit, "Findings and tensors to print; --json has all").shows_default();
  options->source_layout.add(line);
  options->findings.add(line);
  options->resources.add(line);
  line.examples({{"reshard verify model --config config.json", "names, shapes, dtypes; reads headers only"},
                 {"reshard verify step-1000 --mesh dp_replicate=2,dp_shard=8", "was it saved by this mesh?"},
                 {"reshard verify step-1000 --against model", "same values in two formats?"},
                 {"reshard verify step-1000 --values --html report.html", "checksums, NaN, dead rows, as a page"}});
  line.description(
      "A config.json next to the checkpoint is used unless --config names another. Without --config, --layout, --mesh "
      "and --against all data is read. Exits with 1 if there are findings.");
  line.action([options] { return run(*options); });
}

}  // namespace reshard::tools
