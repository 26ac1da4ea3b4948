// SPDX-License-Identifier: Apache-2.0
// reshard convert and reshard plan.
#include <chrono>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>

#include "formats/open.h"
#include "lib/base/output_guard.h"
#include "lib/base/shell.h"
#include "lib/base/text.h"
#include "lib/transport/collectives.h"
#include "tools/commands.h"
#include "tools/html_report.h"
#include "tools/job.h"
#include "tools/job_options.h"
#include "tools/outputs.h"
#include "tools/plan_page.h"
#include "tools/plan_report.h"

namespace reshard::tools {
namespace {

Status check_destination(const ConvertOptions& options) {
  TRY(check_state(options.state, options.destination));
  if (is_url(options.destination)) return check_is_bucket(options.destination);
  const bool is_there = TRY(path_exists(options.destination));
  if (!options.force && is_there)
    return usage_error(options.destination + ": the destination exists; --force replaces it");
  if (options.force && is_there && !TRY(find_format(options.to))->is_file)
    TRY(replaceable_directory({options.destination, files_of_checkpoint}, options.destination));
  if (const std::string parent = parent_path(options.destination); !TRY(is_directory(parent)))
    return io_error(parent + ": not found; the destination's directory must exist");
  return {};
}

Status check_space(const Conversion& conversion, const std::string& destination) {
  if (is_url(destination)) return {};
  // Files of an interrupted run are reused, or removed first.
  const Index free = TRY(free_space_for(destination)) + TRY(Output::held_by_leftover(destination));
  if (free >= conversion.disk_needed()) return {};
  return io_error(parent_path(destination) + ": the output needs " + human_bytes(conversion.disk_needed()) +
                  ", the disk has " + human_bytes(free) + " free. Nothing was written");
}

Json view_json(const ConvertOptions& options, const PreparedConversion& prepared, const ViewReport& report,
               double seconds) {
  Json refused = Json::array();
  for (const auto& [name, why] : report.refused) refused.push_back(Json::object().set("name", name).set("why", why));
  return answer_json("view")
      .set("source", options.source)
      .set("source_format", prepared.source.format->name)
      .set("destination", options.destination)
      .set("target_format", options.to)
      .set("tensors", report.tensors)
      .set("refused", std::move(refused))
      .set("seconds", seconds);
}

// Returns whether the output has the values of the source, under any names and sharding, so that verify reports them
// equal.
bool equals_source(const Conversion& conversion, const ConvertOptions& options) {
  const SourceOptions& source = options.source_layout;
  const bool is_all = options.include.empty() && options.exclude.empty() && options.allow.empty() &&
                      options.repair.empty() && options.model.config.empty() && !options.vocab_padding &&
                      options.vocab_divisible_by == 0;
  const bool is_plain = source.layout.empty() && source.mesh.empty() && source.strip_prefix.empty() &&
                        source.part.empty() && source.renames.empty() && source.weights == "model" &&
                        options.model.family == "auto" && options.model.family_file.empty();
  return is_all && is_plain && !options.merge_adapter && !conversion.computes() &&
         conversion.converted_tensors() == 0 && conversion.notes().repairs.as_array()->empty();
}

// Returns the command that verifies the output: against the source if both are equal, otherwise against its own
// manifest. An output that is only part of what its config describes is not compared with the config.
std::string check_command(const PreparedConversion& prepared, const ConvertOptions& options) {
  const Conversion& conversion = *prepared.conversion;
  const std::string verify = "reshard verify ", out = shell_path(options.destination);
  if (equals_source(conversion, options)) return verify + shell_path(options.source) + " --against " + out;
  const bool is_whole = options.include.empty() && options.exclude.empty() && options.allow.empty() &&
                        options.keep_dtype.empty() && options.quantize == Quantization::kNone &&
                        options.source_layout.part.empty();
  const ModelOptions& model = options.model;
  if (!is_whole) return verify + out + " --family none";
  if (!model.family_file.empty()) return verify + out + " --family-file " + shell_path(model.family_file);
  return verify + out + (model.family == "auto" ? "" : " --family " + model.family);
}

// Writes a view, which copies nothing.
Result<int> make_view(const ConvertOptions& options, const PreparedConversion& prepared,
                      std::chrono::steady_clock::time_point start) {
  constexpr std::size_t kShown = 10;
  if (options.force && TRY(path_exists(options.destination))) {
    const Format* there = TRY(recognised_format(TRY(PathSnapshot::look(options.destination))));
    if (!TRY(look_at(options.destination)).is_regular() || !there || !there->is_file)
      return usage_error(options.destination +
                         ": the destination is not a file of this format; it will not be replaced");
    TRY(check_spares_inputs(options.destination, files_of(prepared.source.reader->catalog())));
  }
  const bool quiet = options.resources.quiet || options.as_json;
  if (!quiet) print_view_plan(prepared);
  if (options.dry_run) {
    const ViewReport planned = {std::ssize(prepared.conversion->source_view().tensors()), 0, {}};
    if (options.as_json) show_json(view_json(options, prepared, planned, 0), 2);
    return 0;
  }
  const ViewReport report = TRY(prepared.conversion->write_view(options.destination, options.force));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.as_json) show_json(view_json(options, prepared, report, seconds), 2);
  if (quiet) return 0;
  for (std::size_t i = 0; i < std::min(kShown, report.refused.size()); ++i)
    print_row(i == 0 ? "left out" : "", printable(report.refused[i].first) + ": " + report.refused[i].second);
  if (report.refused.size() > kShown) print_row("", "and " + with_commas(report.refused.size() - kShown) + " more");
  const File file = TRY(File::open(options.destination));
  print_row("done", printable(options.destination) + "   " + human_bytes(TRY(file.size())) + "   " +
                        human_seconds(seconds) + "   " + count_of(report.tensors, "tensor") + " mapped in place" +
                        (report.joined > 0 ? ", " + count_of(report.joined, "piece") + " joined" : ""));
  print_row("", "it refers to the files of " + printable(options.source) + "; write it again if they move");
  return 0;
}

// Writes the output and shows the progress.
Result<Conversion::Outcome> run_conversion(Conversion& conversion, const ConvertOptions& options, bool quiet) {
  conversion.set_resume(options.resume, [quiet](const std::string& note) {
    if (quiet) return;
    print_row("note", note);
    std::fflush(stdout);
  });
  std::fflush(stdout);
  if (!host()) end_soon_after_signal(conversion.can_resume(options.destination));

  Progress progress("writing", conversion.plan().bytes_read, quiet);
  conversion.set_progress([&](Index done) { progress.update(done); });
  return conversion.run({options.destination,
                         options.force ? files_of_checkpoint : nullptr,
                         {options.layout, options.source_layout.layout, options.model.family_file},
                         options.state});
}

void print_outcome(const PreparedConversion& prepared, const ConvertOptions& options,
                   const Conversion::Outcome& outcome, double seconds) {
  const Conversion& conversion = *prepared.conversion;
  const auto rate = static_cast<Index>(static_cast<double>(conversion.plan().bytes_read) / seconds);
  print_row("done", printable(options.destination) + "   " + human_seconds(seconds) + "   " + human_bytes(rate) +
                        "/s   peak memory " + human_bytes(peak_memory()));
  const Index n = std::ssize(conversion.plan().tensors);
  std::string recorded;
  if (outcome.checksums > 0)
    recorded += ", " + count_of(outcome.checksums, "source CRC") + (outcome.checksums == 1 ? " matches" : " match");
  if (outcome.digests > 0)
    recorded += ", " + count_of(outcome.digests, "digest") + " of the source's manifest verified";
  print_row("proof", with_commas(n) + " of " + count_of(n, "tensor") + ": every element has one source" +
                         (recorded.empty() ? ", the source records no checksums" : recorded) +
                         ", digests in reshard_manifest.json" +
                         (conversion.target().single_file() ? " in the file" : ""));
  if (const auto& identity = conversion.identity()) {
    const ModelConfig& config = *conversion.names().model.config;
    print_row("", (config.architecture.empty() ? config.model_type : config.architecture) + ", " +
                      with_commas(identity->present) + " of " + count_of(identity->expected, "tensor") + " of " +
                      config.path);
  }
  // Some formats cannot be read without a config, which an output of no family lacks.
  const bool can_be_read =
      prepared.target->open && (options.model.family != "none" || open_checkpoint(options.destination));
  if (can_be_read) print_row("", "check it any time: " + check_command(prepared, options));
}

}  // namespace

Result<int> convert(const ConvertOptions& options) {
  if (leads()) TRY(check_destination(options));
  const auto start = std::chrono::steady_clock::now();
  PreparedConversion prepared = TRY(prepare(options, false));
  if (prepared.target->write_view && is_url(options.destination))
    return usage_error("--to " + options.to + " writes a local file; expected a local path, got a URL");
  if (prepared.target->write_view) return leads() ? make_view(options, prepared, start) : 0;
  Conversion& conversion = *prepared.conversion;
  const bool quiet = options.resources.quiet || options.as_json;
  if (!quiet) print_plan(prepared, options);
  if (const Index ranks = rank_count(job_ranks()); ranks > 1) {
    const Index machines = TRY(machine_count());
    const ChosenStrategy chosen = choose_strategy(conversion, options, ranks, machines);
    conversion.set_strategy(chosen.strategy);
    if (!quiet) print_strategy(chosen, ranks, machines);
  }
  TRY(conversion.memory());
  if (leads()) TRY(check_space(conversion, options.destination));
  if (options.dry_run) {
    if (!quiet) print_row("dry run", "nothing was written");
    if (options.as_json) show_json(plan_json(prepared, options, "plan"), 2);
    return 0;
  }
  const Conversion::Outcome outcome = TRY(run_conversion(conversion, options, quiet));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.as_json)
    show_json(plan_json(prepared, options, "convert")
                  .set("destination", options.destination)
                  .set("checksums", outcome.checksums)
                  .set("digests", conversion.plan().tensors.size())
                  .set("source_digests", outcome.digests)
                  .set("seconds", seconds),
              2);
  if (quiet) return 0;
  print_outcome(prepared, options, outcome, seconds);
  return 0;
}

namespace {

struct PlanOptions : ConvertOptions {
  std::string html;
};

Result<int> plan(const PlanOptions& options) {
  const PreparedConversion prepared = TRY(prepare(options, true));
  if (prepared.target->write_view)
    return usage_error("--to " + options.to + " copies no data, so there is no plan to show");
  if (!options.html.empty()) TRY(check_spares_inputs(options.html, prepared.conversion->inputs()));
  if (!options.html.empty())
    TRY(write_html(options.html, "plan", {facts_of(options.source, prepared.source.reader->catalog())},
                   plan_page_json(prepared, options)));
  if (options.as_json) {
    show_json(plan_json(prepared, options, "plan"), 2);
    return 0;
  }
  if (options.resources.quiet) return 0;
  print_plan(prepared, options);
  const Index machines = ceil_div(options.ranks, options.ranks_per_machine);
  if (options.ranks > 1)
    print_strategy(choose_strategy(*prepared.conversion, options, options.ranks, machines), options.ranks, machines);
  if (const std::vector<Index> bytes = prepared.conversion->bytes_of_ranks(); bytes.size() > 1)
    print_row("mesh", mesh_text(bytes));
  const MemoryPlan memory = TRY(prepared.conversion->memory());
  print_row("memory", human_bytes(memory.peak) + " at most" + (options.ranks > 1 ? " a rank" : "") +
                          ", in slabs of up to " + human_bytes(memory.slab_bytes));
  if (const RequestCounts requests = requests_of(*prepared.conversion, options); requests.read + requests.write > 0)
    print_row("requests",
              "about " + with_commas(requests.read) + " to read and " + with_commas(requests.write) + " to write");
  const auto& files = prepared.conversion->target().catalog().files;
  constexpr std::size_t kShown = 8;
  for (std::size_t i = 0; i < std::min(files.size(), kShown); ++i)
    print_row(i == 0 ? "files" : "", files[i].path + "   " + human_bytes(files[i].size));
  if (files.size() > kShown) print_row("", "and " + with_commas(files.size() - kShown) + " more");
  return 0;
}

}  // namespace

void add_convert(CommandLine& line) {
  auto options = std::make_shared<ConvertOptions>();
  options->add(line, true);
  line.group("Target");
  line.add_flag("--force", options->force, "Replace the destination if it is a checkpoint").common();
  line.group("Run");
  line.add_flag("--dry-run", options->dry_run, "Check everything, write nothing").common();
  line.add_choice("--resume", options->resume,
                  {{"auto", Resume::kAuto}, {"never", Resume::kNever}, {"require", Resume::kRequire}},
                  "Resume an interrupted run: auto, never or require")
      .takes("WHEN")
      .shows_default();
  add_state(line, options->state);
  line.add_flag("--json", options->as_json, "Print the result as JSON");
  line.examples({{"reshard convert step-1000 model --to hf", "a Hugging Face model"},
                 {"reshard convert step-1000 out --to dcp --mesh tp=4,dp_shard=2", "the same state for other ranks"},
                 {"reshard convert model out --to dcp --names torchtitan", "a Hugging Face model for torchtitan"},
                 {"reshard convert step-1000 model --to hf --dtype bfloat16 --keep-dtype '*norm*'", ""},
                 {"reshard convert step-1000 archive.h5 --to hdf5 --codec zstd:3", "an archive in one file"},
                 {"reshard convert step-1000 view.h5 --to hdf5-view --names hf", "an HDF5 view that copies nothing"}});
  line.description(
      "The destination appears when it is complete. Until then all files are in DST.partial. After a kill, a full disk "
      "or the end of a job's time limit, rerun the same command to resume.");
  line.action([options] { return convert(*options); });
}

void add_plan(CommandLine& line) {
  auto options = std::make_shared<PlanOptions>();
  options->add(line, false);
  line.group("Run");
  line.add_option("--ranks", options->ranks, "Plan for this number of ranks (mpirun -n)").within(1, 1 << 20);
  line.add_option("--ranks-per-machine", options->ranks_per_machine, "Ranks that share one machine")
      .within(1, 1 << 20)
      .shows_default();
  line.group("Report");
  line.add_flag("--json", options->as_json, "Print the plan as JSON").common();
  add_html_option(line, options->html);
  line.examples({{"reshard plan step-1000 --to dcp --mesh tp=4 --json", ""},
                 {"reshard plan step-1000 /scratch/model --to hf", "also checks the free disk space"}});
  line.description("Only metadata is read; the data files may be missing.");
  line.action([options] { return plan(*options); });
}

}  // namespace reshard::tools
