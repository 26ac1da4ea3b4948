// SPDX-License-Identifier: Apache-2.0
// reshard watch: converts each new step of a training run.
//
// A pass over the run takes these steps:
//
//   1. List the run's checkpoints and the steps in their names.
//   2. Choose the steps to keep: all, or those of --keep-last, --keep-every and --keep-best. The newest complete one is
//      always among them.
//   3. Convert each complete step that is kept and has no output yet, oldest first. An output appears under its name
//      only when it is complete and proven, so that a killed run leaves nothing to repair and is resumed.
//   4. Run --then on each output that it has not succeeded on, kept or not.
//   5. With --html, measure new outputs for the page (watch_page.h), before an earlier step is removed.
//   6. Remove the outputs of steps that are not kept and, with --prune-source, their sources, if this DST's record says
//      that they were converted and that --then has succeeded.
//   7. With --without-optimizer-after, rewrite the sources of older steps for which the record says the same.
//
// The record (watch_record.h) has each step that was converted and whether --then is done, and before that
// each step whose conversion has started: its output appears only when it is proven, also if this process dies before
// it records that. The record is replaced atomically after each change. If it is lost, outputs are found again by their
// names, and --then runs again.
//
// A trainer that starts again, or a link that leads to another run, may put another checkpoint in the place of one that
// was converted. The record therefore has the size and time of one data file of each. A step whose file differs is not
// proven any more, and is converted again once it is complete and has not changed for a minute.
//
// Between two passes it waits for --interval, or until the run's directories have changed and are quiet again. A run
// that does not exist yet is waited for.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "formats/open.h"
#include "formats/training_run.h"
#include "lib/base/catch_exceptions.h"
#include "lib/base/directory_events.h"
#include "lib/base/file.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/shell.h"
#include "lib/base/storage/storage.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/output/work_directory.h"
#include "tools/child.h"
#include "tools/commands.h"
#include "tools/drop_optimizer.h"
#include "tools/html_report.h"
#include "tools/job_options.h"
#include "tools/watch_page.h"
#include "tools/watch_record.h"
#include "tools/watch_steps.h"

namespace reshard::tools {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

struct WatchOptions : ConvertOptions {
  std::string keep_best, then, html;
  Index every = 1, keep_last = 0, keep_every = 0, without_optimizer_after = 0;
  double interval = 30;
  bool once = false, prune_source = false;

  bool changes_sources() const { return prune_source || without_optimizer_after > 0; }
  bool removes() const { return keep_last > 0 || keep_every > 0 || !keep_best.empty(); }
};

// Waits after a failure, longer each time.
struct Backoff {
  Clock::time_point next;
  Seconds wait{0};
  std::string why = {};
};

std::string replaced_braces(const std::string& command, const std::string& path) {
  std::string out;
  std::size_t at = 0;
  for (std::size_t found; (found = command.find("{}", at)) != std::string::npos; at = found + 2)
    out += command.substr(at, found - at) + shell_path(path);
  return out + command.substr(at);
}

class Watch {
 public:
  explicit Watch(const WatchOptions& options)
      : options_(options), run_(without_slashes(options.source)), root_(options.destination) {}

  Result<int> run() {
    TRY(prepare());
    for (;;) {
      if (!options_.once) watch_directories();  // before the pass, so that it misses nothing
      const Status passed = pass();
      if (options_.once && !passed) return passed.error();
      if (options_.once) return failures_ > 0 ? 1 : 0;
      if (!passed)
        report_once("failed", passed.error().message());
      else if (is_there_)
        last_reported_.clear();
      wait();
      if (interrupted()) return 128 + ending_signal();
    }
  }

 private:
  // Watches the run and the steps that are not converted, with the files of their ranks.
  void watch_directories() {
    constexpr int kLevels = 4;
    std::set<std::string> converted;
    for (const auto& [name, done] : record_.steps)
      if (!done.replaced) converted.insert(done.source);
    events_.watch(run_, kLevels, converted);
    if (is_url(run_)) return;
    const auto node = node_at(run_);
    if (!node || (*node && !(*node)->is_link())) return;
    std::string above = parent_path(run_);  // where the run will appear, or its link be replaced
    const auto exists = [&] {
      const Result<bool> there = is_directory(above);
      return !there.has_value() || *there;
    };
    while (!exists() && parent_path(above) != above) above = parent_path(above);
    events_.watch(above, 0, {});
  }

  // Waits until --interval has passed, or until the run has changed and then not for a moment: a save takes a while.
  void wait() {
    constexpr std::chrono::milliseconds kTick{100}, kQuiet{500};
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(options_.interval));
    std::optional<Clock::time_point> changed;
    while (Clock::now() < end && !interrupted()) {
      if (events_.wait(kTick))
        changed = Clock::now();
      else if (changed && Clock::now() - *changed >= kQuiet)
        return;
    }
  }

  Status prepare() {
    if (options_.changes_sources() && is_url(run_))
      return unsupported(printable(run_) +
                         ": --prune-source and --without-optimizer-after need a run on a file system; " +
                         "a rule of the bucket can remove old steps");
    const auto run = TRY(entry_at(run_));
    if (run ? !run->is_directory : options_.once) return io_error(printable(run_) + ": not found, or not a directory");
    TRY(check_places());
    if (!TRY(path_exists(root_))) TRY(make_directory(root_));
    const std::string real_root = TRY(real_path(root_));  // a link to a larger disk, maybe
    lock_ = TRY(DirectoryLock::take(real_root.empty() ? root_ : real_root));
    if (!lock_->is_held()) return usage_error(printable(root_) + ": another reshard watch writes there");
    is_file_ = TRY(find_format(options_.to))->is_file;
    if (!options_.html.empty()) page_ = TRY(WatchPage::open(options_.html, root_, options_));
    TRY(remove_leftovers(root_));
    record_ = TRY(WatchRecord::read(root_));
    return {};
  }

  // Fails if DST is RUN or is inside it, also if RUN does not exist yet.
  Status check_places() const {
    namespace fs = std::filesystem;
    const auto plain = [](const std::string& path) {
      std::error_code ignored;  // without a working directory, a relative path stays relative
      return fs::absolute(path, ignored).lexically_normal().string() + "/";
    };
    const bool exists = !is_url(run_) && TRY(is_directory(run_));
    const std::string& existing = TRY(path_exists(root_)) ? root_ : parent_path(root_);
    if (exists ? TRY(is_at_or_below(existing, run_)) : !is_url(run_) && plain(root_).starts_with(plain(run_)))
      return usage_error(printable(root_) + ": is the run or inside it, so its outputs would be taken for steps; " +
                         "choose another directory");
    return {};
  }

  // Returns whether the run exists. Reports once that it does not. Prepares it when it is seen first or again: it may
  // be another directory, in which a pass was interrupted.
  Result<bool> find_run() {
    const bool was_there = is_there_;
    forget_stored(run_);
    is_there_ = TRY(is_directory(run_));
    if (!is_there_ && options_.once) return io_error(printable(run_) + ": not found, or not a directory");
    if (!is_there_) report_once("waiting", run_ + (was_seen_ ? " is gone" : " does not exist yet"));
    was_seen_ = was_seen_ || is_there_;
    if (!is_there_ || was_there) return is_there_;
    TRY(check_places());
    if (!options_.changes_sources()) return true;
    std::set<std::string> parents{run_};
    for (const RunStep& step : TRY(steps_of_run(run_, options_.every))) parents.insert(parent_path(step.source));
    for (const std::string& parent : parents) TRY(remove_leftovers(parent));
    return true;
  }

  // Removes what an interrupted pass was removing, and the records in DST that it was writing.
  Status remove_leftovers(const std::string& directory) const {
    const auto is_left = [&](const std::string& name) {
      return is_removed_name(name) || (directory == root_ && is_unfinished_record(name));
    };
    const auto entries = TRY(list_directory(directory));
    for (const DirectoryEntry& entry : entries)
      if (is_left(entry.name)) TRY(remove(path_join(directory, entry.name)));
    return {};
  }
  static Status remove(const std::string& path) {
    return TRY(reshard::look_at(path)).is_directory() ? remove_tree(path) : remove_file(path);
  }

  Status pass() {
    failures_ = 0;
    if (!TRY(find_run())) return {};
    const std::vector<RunStep> steps = TRY(steps_of_run(run_, options_.every));
    std::vector<RunStep> complete;
    for (const RunStep& step : steps)
      if (TRY(is_complete(step))) complete.push_back(step);
    const Status passed = convert_and_remove(complete);
    if (page_ && !interrupted()) TRY(page_->write(run_, TRY(watched(steps))));
    return passed;
  }

  Status convert_and_remove(const std::vector<RunStep>& complete) {
    const std::set<std::string> best = TRY(best_steps());
    const std::vector<RunStep> all = TRY(with_removed(complete));
    std::set<std::string> kept = kept_names(complete, best);
    kept.merge(kept_names(all, best));
    for (const RunStep& step : complete) {
      if (!kept.contains(step.name) && !TRY(awaits_then(step.name)) && !TRY(awaits_record(step.name))) continue;
      TRY(take(step));
      if (interrupted()) return {};
    }
    if (page_) TRY(measure(complete));
    if (interrupted()) return {};
    if (complete.empty() || !TRY(gap_of_checkpoint(complete.back().source)).empty())
      return {};  // the newest has changed since; others may be needed
    const auto named = options_.changes_sources() ? TRY(steps_named_by_run(complete)) : std::set<std::string>();
    if (options_.removes() && knows_best(complete, best)) TRY(remove_others(all, kept, named));
    if (options_.without_optimizer_after > 0) TRY(drop_optimizers(complete, named));
    return {};
  }

  // Measures each new output, and how far it is from the step before it.
  Status measure(const std::vector<RunStep>& complete) {
    for (std::size_t i = 0; i < complete.size() && !interrupted(); ++i) {
      const RunStep& step = complete[i];
      if (!record_.has(step.name) || (page_->knows(step.name) && !renewed_.contains(step.name))) continue;
      if (!TRY(path_exists(output_of(step.name)))) continue;
      std::string before, path;
      if (i > 0) {
        before = complete[i - 1].name;
        path = TRY(path_exists(output_of(before))) ? output_of(before) : complete[i - 1].source;
      }
      const auto took = seconds_.find(step.name);
      TRY(page_->measure({step.name, step.source, output_of(step.name), step.number},
                         took == seconds_.end() ? -1 : took->second, before, path));
      renewed_.erase(step.name);
    }
    return {};
  }

  // Returns the steps of the run, and those of the record whose sources are gone, in the order of their numbers.
  Result<std::vector<WatchedStep>> watched(const std::vector<RunStep>& steps) const {
    std::vector<WatchedStep> out;
    for (const auto& [name, done] : record_.steps)
      out.push_back({name, done.source, output_of(name), step_in_name(name)});
    for (const RunStep& step : steps)
      if (!record_.has(step.name)) out.push_back({step.name, step.source, output_of(step.name), step.number});
    std::stable_sort(out.begin(), out.end(),
                     [](const WatchedStep& a, const WatchedStep& b) { return a.number < b.number; });
    for (WatchedStep& step : out) {
      using State = WatchedStep::State;
      if (const auto failed = failed_.find(step.name); failed != failed_.end())
        step.state = State::kFailed, step.remark = failed->second.why;
      else if (record_.has(step.name))
        step.state = TRY(path_exists(step.output)) ? State::kConverted : State::kRemoved;
      else
        step.state = complete_.contains(step.name) ? State::kSkipped : State::kIncomplete;
    }
    return out;
  }

  // Returns whether a step is complete. Opens each step only until it was complete once, because there may be many. One
  // in the place of another that was converted must not have changed for a minute: if metadata and files of both are
  // mixed, it can look complete.
  Result<bool> is_complete(const RunStep& step) {
    StepRecord* const done = record_.find(step.name);
    if (done != nullptr && !done->replaced) {
      if (!TRY(is_replaced(step))) return true;
      complete_.erase(step.name);
      done->replaced = true;
      done->proven = done->lacks_optimizer = false;
      TRY(record_.write());
    }
    if (complete_.contains(step.name)) return true;
    const IoFailureWatch watch;
    const auto files = catch_exceptions([&] { return files_if_complete(step.source); });
    if (!files && watch.may_be_io_failure_or_denial(files.error())) report(failed_, step, files.error());
    if (!files || (done != nullptr && !TRY(are_quiet(*files)))) return false;
    complete_[step.name] = files->empty() ? std::string() : files->front();
    return true;
  }

  // Returns whether another checkpoint is in the place of one that was converted.
  Result<bool> is_replaced(const RunStep& step) {
    const auto file = record_.files.find(step.name);
    if (file == record_.files.end()) return false;
    StepRecord& done = record_.steps[step.name];
    const auto entry = TRY(entry_at(step.source + file->second.path));
    if (entry && entry->size == file->second.size && entry->mtime_ns == file->second.mtime_ns) return done.replaced;
    if (!done.rewriting) return true;
    TRY(finish_rewriting(step, done));  // this process was killed when it had just rewritten it
    return false;
  }

  static Result<bool> are_quiet(const std::vector<std::string>& files) {
    constexpr std::chrono::minutes kQuiet{1};
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    for (const std::string& file : files)
      if (const auto entry = TRY(entry_at(file)); !entry || now - std::chrono::nanoseconds(entry->mtime_ns) < kQuiet)
        return false;
    return true;
  }

  // Records a data file of the step's source. Without one, or if its name is not valid UTF-8, a later replacement is
  // not noticed.
  Status take_data_file(const RunStep& step) {
    std::string path = complete_[step.name];
    if (path.empty())
      if (const auto files = files_if_complete(step.source); files && !files->empty()) path = files->front();
    record_.files.erase(step.name);
    if (!path.starts_with(step.source) || valid_utf8(path) != path) return {};
    if (const auto entry = TRY(entry_at(path)))
      record_.files[step.name] = {path.substr(step.source.size()), entry->size, entry->mtime_ns};
    return {};
  }

  // Returns whether a step was converted and --then has not succeeded on its output.
  Result<bool> awaits_then(const std::string& name) const {
    const StepRecord* const done = record_.find(name);
    return !options_.then.empty() && done != nullptr && !done->then_succeeded && TRY(path_exists(output_of(name)));
  }

  // Returns whether an output appeared and this process was killed before it was recorded.
  Result<bool> awaits_record(const std::string& name) const {
    return record_.started.contains(name) && TRY(path_exists(output_of(name)));
  }

  // Returns the lines of --keep-best's file. None: it is not there yet.
  Result<std::set<std::string>> best_steps() const {
    constexpr Index kMaxBestBytes = Index{64} << 20;
    if (options_.keep_best.empty() || !TRY(path_exists(options_.keep_best))) return std::set<std::string>();
    return lines_of(TRY(read_whole_file(options_.keep_best, kMaxBestBytes)));
  }

  bool means(const std::string& line, const std::string& name, const std::string& source) const {
    return line_means(line, {source, name, step_in_name(name)}, output_of(name));
  }

  // Returns whether each line of --keep-best's file is known to be a step, or reports the one that is not. The best
  // step would otherwise be removed because its name is misspelt, or because the file is only about to be written.
  bool knows_best(const std::vector<RunStep>& complete, const std::set<std::string>& best) {
    if (options_.keep_best.empty()) return true;
    for (const std::string& line : best) {
      const bool is_step = std::any_of(complete.begin(), complete.end(),
                                       [&](const RunStep& step) { return means(line, step.name, step.source); }) ||
                           std::any_of(record_.steps.begin(), record_.steps.end(), [&](const auto& entry) {
                             return means(line, entry.first, entry.second.source);
                           });
      if (is_step) continue;
      ++failures_;
      const std::string text = options_.keep_best + ": '" + line + "' is no complete step of " + run_ +
                               "; nothing is removed until each line is the number or name of one";
      if (text != unknown_best_) report_event("failed", {}, text);
      unknown_best_ = text;
      return false;
    }
    return !best.empty();
  }

  // Returns how many of the newest steps are kept.
  Index newest_kept() const { return std::max<Index>(1, options_.keep_last); }

  // Returns whether a step has an output on which nothing has failed.
  Result<bool> is_good(const std::string& name) const {
    return record_.has(name) && !failed_.contains(name) && TRY(path_exists(output_of(name)));
  }

  // Returns the names of the steps that stay: also of those without a number, whose age is unknown.
  std::set<std::string> kept_names(const std::vector<RunStep>& complete, const std::set<std::string>& best) const {
    std::set<std::string> out;
    const auto last = static_cast<std::size_t>(newest_kept());
    for (std::size_t i = 0; i < complete.size(); ++i) {
      const RunStep& step = complete[i];
      const bool is_kept = !options_.removes() || i + last >= complete.size() || step.number < 0 ||
                           (options_.keep_every > 0 && step.number % options_.keep_every == 0) ||
                           std::any_of(best.begin(), best.end(),
                                       [&](const std::string& line) { return means(line, step.name, step.source); });
      if (is_kept) out.insert(step.name);
    }
    return out;
  }

  std::string output_of(const std::string& name) const {
    return path_join(root_, name + (is_file_ ? "." + options_.to : ""));
  }

  // Converts a step and runs --then, if that is not done. A failure is reported, and tried again later.
  Status take(const RunStep& step) {
    if (must_wait(failed_, step)) return {};
    report(failed_, step, catch_exceptions([&] { return make(step); }));
    return {};
  }

  // Returns whether a step failed so recently that it is not tried again in this pass.
  bool must_wait(const std::map<std::string, Backoff>& failed, const RunStep& step) {
    const auto waits = failed.find(step.name);
    if (waits == failed.end() || Clock::now() >= waits->second.next) return false;
    ++failures_;
    return true;
  }

  // Forgets earlier failures of a step after a success. Otherwise reports the failure and doubles the wait.
  void report(std::map<std::string, Backoff>& failed, const RunStep& step, const Status& status) {
    if (status) failed.erase(step.name);
    if (status || interrupted()) return;
    ++failures_;
    constexpr Seconds kLongest{3600};
    Backoff& backoff = failed[step.name];
    backoff.wait = std::min(kLongest, std::max(Seconds(options_.interval), 2 * backoff.wait));
    backoff.next = Clock::now() + std::chrono::duration_cast<Clock::duration>(backoff.wait);
    backoff.why = status.error().message();
    report_event("failed", step, status.error().message());
  }

  Status make(const RunStep& step) {
    const std::string output = output_of(step.name);
    if (TRY(path_exists(output)) && !record_.has(step.name)) {
      const auto started = record_.started.find(step.name);
      const bool proven = started != record_.started.end() && started->second == step.source;
      if (!proven && !TRY(path_exists(path_join(output, kManifestFile))))
        return usage_error(printable(output) + ": exists, and reshard watch has not written it; move it away");
      if (!proven) TRY(take_data_file(step));
      TRY(set_converted(step, proven));  // this process was killed, or the record was lost
    }
    const StepRecord* const before = record_.find(step.name);
    const bool is_replaced = before != nullptr && before->replaced;
    if (is_replaced || !TRY(path_exists(output))) {
      const auto start = Clock::now();
      ConvertOptions one = options_;
      one.source = step.source;
      one.destination = output;
      one.resources.quiet = true;
      one.as_json = false;
      one.force = is_replaced;
      record_.started[step.name] = step.source;
      TRY(take_data_file(step));
      TRY(record_.write());
      TRY(convert(one));
      TRY(set_converted(step, true));
      if (is_replaced) renewed_.insert(step.name);
      const double seconds = Seconds(Clock::now() - start).count();
      seconds_[step.name] = seconds;
      report_event("converted", step, human_seconds(seconds));
    }
    TRY(remove_work_of(output));
    StepRecord& done = record_.steps[step.name];
    if (options_.then.empty() || done.then_succeeded) return {};
    const std::string command = replaced_braces(options_.then, output);
    if (const int code = TRY(run_child({"/bin/sh", "-c", command}, OnInterrupt::kWait)); code != 0)
      return io_error("'" + printable(command) + "' ended with exit code " + std::to_string(code));
    done.then_succeeded = true;
    TRY(record_.write());
    report_event("then", step, command);
    return {};
  }

  Status set_converted(const RunStep& step, bool proven) {
    record_.started.erase(step.name);
    record_.steps[step.name] = {step.source, proven};
    return record_.write();
  }

  // Removes the work directories of a run that was killed when its output had just appeared.
  static Status remove_work_of(const std::string& output) {
    for (const std::string& work : {work_directory(output), publishing_directory(output)}) {
      if (!TRY(path_exists(work))) continue;
      const DirectoryLock lock = TRY(claim_work(work));
      TRY(remove_work(work));
    }
    return {};
  }

  // Returns the complete steps, and in their places the converted ones whose sources the trainer has removed.
  Result<std::vector<RunStep>> with_removed(std::vector<RunStep> complete) const {
    for (const auto& [name, done] : record_.steps) {
      if (!done.proven || TRY(path_exists(done.source)) || !TRY(path_exists(output_of(name)))) continue;
      const RunStep step{done.source, name, step_in_name(name)};
      const auto later = std::find_if(complete.begin(), complete.end(),
                                      [&](const RunStep& other) { return other.number > step.number; });
      complete.insert(later, step);
    }
    return complete;
  }

  // `steps` are the complete ones and those whose sources are gone.
  Status remove_others(const std::vector<RunStep>& steps, const std::set<std::string>& kept,
                       const std::set<std::string>& named) {
    std::set<std::string> good;
    for (const RunStep& step : steps)
      if (TRY(is_good(step.name))) good.insert(step.name);
    Index left = std::ssize(good);
    for (const RunStep& step : steps) {
      if (good.contains(step.name) && left-- <= newest_kept()) continue;  // also if a newer step has failed
      if (kept.contains(step.name) || failed_.contains(step.name) || TRY(awaits_then(step.name))) continue;
      const StepRecord* const done = record_.find(step.name);
      if (done == nullptr) continue;  // never converted here
      if (const std::string output = output_of(step.name); TRY(path_exists(output))) TRY(remove_whole(output, step));
      if (!TRY(path_exists(step.source))) continue;
      if (options_.prune_source && done->proven && !TRY(is_replaced(step)) && !named.contains(step.source))
        TRY(remove_whole(step.source, step));
    }
    return {};
  }

  // Rewrites the sources of proven steps without their optimizer, but not those of the newest, of the named ones and of
  // those without a number.
  Status drop_optimizers(const std::vector<RunStep>& complete, const std::set<std::string>& named) {
    const std::size_t spared = options_.without_optimizer_after;
    for (std::size_t i = 0; i + spared < complete.size(); ++i) {
      const RunStep& step = complete[i];
      StepRecord* const done = record_.find(step.name);
      if (done == nullptr || step.number < 0 || named.contains(step.source)) continue;
      if (!done->proven || done->lacks_optimizer || !TRY(path_exists(step.source))) continue;
      if (failed_.contains(step.name) || TRY(awaits_then(step.name)) || must_wait(failed_rewrites_, step)) continue;
      if (TRY(is_replaced(step))) continue;
      report(failed_rewrites_, step, catch_exceptions([&] { return drop_optimizer_of(step, *done); }));
      if (interrupted()) return {};
    }
    return {};
  }

  Status drop_optimizer_of(const RunStep& step, StepRecord& done) {
    done.rewriting = true;  // a kill leaves other files, which are no new checkpoint
    TRY(record_.write());
    const bool had = TRY(drop_optimizer(step.source, removed_name(step.source), options_.resources));
    done.lacks_optimizer = true;
    TRY(finish_rewriting(step, done));
    if (had) report_event("rewritten", step, step.source + " without its optimizer");
    return {};
  }

  Status finish_rewriting(const RunStep& step, StepRecord& done) {
    complete_[step.name].clear();  // its files may have other names
    TRY(take_data_file(step));
    done.rewriting = false;
    return record_.write();
  }

  // Renames first, so that a half-removed checkpoint is not taken for one.
  Status remove_whole(const std::string& path, const RunStep& step) {
    const std::string away = removed_name(path);
    TRY(rename_no_replace(path, away));
    TRY(remove(away));
    report_event("removed", step, path);
    return {};
  }

  // Reports what keeps the whole run from being watched, unless that was reported last.
  void report_once(const std::string& event, const std::string& text) {
    if (text != last_reported_) report_event(event, {}, text);
    last_reported_ = text;
  }

  void report_event(const std::string& event, const RunStep& step, const std::string& text) const {
    if (options_.as_json) {
      Json line = Json::object();
      line.set("schema", "reshard.watch/1").set("event", event);
      if (!step.name.empty())
        line.set("step", step.number).set("source", step.source).set("output", output_of(step.name));
      std::printf("%s\n", to_text(line.set("text", text), 0).c_str());
    } else if (!options_.resources.quiet || event == "failed") {
      std::printf("%-10s%s%s%s\n", event.c_str(), printable(step.name).c_str(), step.name.empty() ? "" : "   ",
                  printable(text).c_str());
    }
    std::fflush(stdout);
  }

  const WatchOptions& options_;
  const std::string run_, root_;
  std::optional<DirectoryLock> lock_;
  bool is_file_ = false;  // an output is one file
  WatchRecord record_;
  std::map<std::string, std::string> complete_;     // by name, as below: a data file of steps that have been complete
  std::set<std::string> renewed_;                   // converted again in this process, and not measured since
  std::map<std::string, double> seconds_;           // of conversions in this process, by name
  std::map<std::string, Backoff> failed_;           // conversions and commands, by the step's name
  std::map<std::string, Backoff> failed_rewrites_;  // rewrites without the optimizer, likewise
  int failures_ = 0;                                // of the current pass
  std::string unknown_best_;                        // the last report of a line of --keep-best's file
  bool is_there_ = false, was_seen_ = false;        // the run exists; has existed
  std::string last_reported_;                       // by report_once(), until a pass succeeds
  std::optional<WatchPage> page_;                   // with --html
  DirectoryEvents events_;
};

Result<int> watch(const WatchOptions& options) {
  if (options.prune_source && !options.removes())
    return usage_error("--prune-source needs --keep-last, --keep-every or --keep-best, which say what stays");
  TRY(options.conversion_options());  // fails now if the options are wrong
  return Watch(options).run();
}

}  // namespace

void add_watch(CommandLine& line) {
  auto options = std::make_shared<WatchOptions>();
  line.add_option("RUN", options->source, "Directory of the run, with a checkpoint per step").read().required();
  line.add_option("DST", options->destination, "Directory of the outputs, one per step; created if missing").required();
  options->add_format(line, "--to", "Format to write", false);
  line.group("Steps");
  line.add_option("--every", options->every, "Only steps that are a multiple of N")
      .takes("N")
      .within(Index{1}, Index{1} << 40)
      .common();
  line.add_option("--then", options->then, "Run this shell command on each output; {} is its path")
      .takes("COMMAND")
      .common();
  line.add_option("--keep-last", options->keep_last, "Keep the last N steps' outputs and remove others")
      .takes("N")
      .within(Index{1}, Index{1} << 40)
      .common();
  line.add_option("--keep-every", options->keep_every, "Keep outputs of steps that are a multiple of N")
      .takes("N")
      .within(Index{1}, Index{1} << 40);
  line.add_option("--keep-best", options->keep_best, "Keep outputs of the steps listed in FILE, one per line")
      .takes("FILE")
      .read();
  line.add_flag("--prune-source", options->prune_source, "Also remove the sources of removed outputs");
  line.add_option("--without-optimizer-after", options->without_optimizer_after,
                  "Remove the optimizer from converted sources but the last N")
      .takes("N")
      .within(Index{1}, Index{1} << 40);
  line.group("Run");
  line.add_flag("--once", options->once, "Make one pass, then exit (with 1 if a step failed)").common();
  line.add_option("--interval", options->interval, "Longest time between two scans of the run, in seconds")
      .takes("SECONDS")
      .within_real(0.1, 1e6)
      .shows_default();
  line.add_flag("--json", options->as_json, "Print each event as a line of JSON");
  add_html_option(line, options->html);
  line.option("--html").written();  // WatchPage::open() checks it as a report, when DST is there, which may contain it
  options->add_changes(line);
  for (const char* const option : {"--strategy", "--transport"}) line.option(option).hidden();
  line.examples({{"reshard watch outputs models --to hf --then 'evaluate {}'", ""},
                 {"reshard watch outputs models --to hf --every 1000 --keep-last 3 --once", "from cron"}});
  line.description(
      "Each complete step is converted and proven as by 'reshard convert', oldest first, and appears in DST under its "
      "own name. A failed step is reported and tried again, less and less often; the others continue. After a kill, "
      "the "
      "same command resumes. The newest complete step is never removed, nor a step that was not converted.");
  line.action([options] { return watch(*options); });
}

}  // namespace reshard::tools
