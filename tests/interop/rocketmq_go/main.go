// A driver around the unmodified RocketMQ Go client: driver REGISTRY LIFETIME_SECONDS.
//
// Each line of standard input is a JSON object with the keys id, step and that step's arguments; it is answered by one
// line, {"id": …, "returned": …} or {"id": …, "raised": [{"class": …, "message": …, "code": …}]}. Between them come
// lines with the key event: what consumers and streams of messages meet. Bodies are base64. It ends with its input, or
// with status 3 after its lifetime.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2/primitive"
)

const maxLineBytes = 16 << 20

type object = map[string]interface{}

// request holds the arguments of every step; a step reads those that it names.
type request struct {
	ID                int64     `json:"id"`
	Step              string    `json:"step"`
	Producer          string    `json:"producer"`
	Consumer          string    `json:"consumer"`
	Group             string    `json:"group"`
	Topic             string    `json:"topic"`
	Broker            string    `json:"broker"`
	Way               string    `json:"way"`
	Message           message   `json:"message"`
	Messages          []message `json:"messages"`
	Count             int       `json:"count"`
	Queues            int       `json:"queues"`
	Seconds           int       `json:"seconds"`
	PauseMs           int       `json:"pause_ms"`
	Expression        string    `json:"expression"`
	SQL               bool      `json:"sql"`
	Broadcast         bool      `json:"broadcast"`
	Orderly           bool      `json:"orderly"`
	Failing           bool      `json:"failing"`
	Replier           string    `json:"replier"`
	MaxReconsumeTimes *int32    `json:"max_reconsume_times"`
	User              string    `json:"user"`
	Secret            string    `json:"secret"`
}

type driver struct {
	registry  []string
	instances int
	producers map[string]startedProducer
	consumers map[string]startedConsumer
	output    sync.Mutex
}

func main() {
	lifetime, err := strconv.Atoi(os.Args[2])
	if err != nil {
		panic(err)
	}
	time.AfterFunc(time.Duration(lifetime)*time.Second, func() { os.Exit(3) })
	d := &driver{
		registry:  []string{os.Args[1]},
		producers: map[string]startedProducer{},
		consumers: map[string]startedConsumer{},
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, maxLineBytes)
	for lines.Scan() {
		d.emit(d.answer(lines.Bytes()))
	}
	d.close()
}

func (d *driver) answer(line []byte) object {
	var r request
	if err := json.Unmarshal(line, &r); err != nil {
		panic(err)
	}
	returned, err := d.run(&r)
	if err != nil {
		return object{"id": r.ID, "raised": raised(err)}
	}
	return object{"id": r.ID, "returned": returned}
}

func raised(err error) []object {
	view := object{"class": fmt.Sprintf("%T", err), "message": err.Error(), "code": nil}
	var refused primitive.MQBrokerErr
	if errors.As(err, &refused) {
		view["code"] = refused.ResponseCode
	}
	return []object{view}
}

func (d *driver) emit(line object) {
	text, err := json.Marshal(line)
	if err != nil {
		panic(err)
	}
	d.output.Lock()
	defer d.output.Unlock()
	fmt.Println(string(text))
}

// instance names one client of this process: clients with equal names share everything.
func (d *driver) instance() string {
	d.instances++
	return fmt.Sprintf("%d#%d", os.Getpid(), d.instances)
}

func (d *driver) run(r *request) (interface{}, error) {
	switch r.Step {
	case "start_producer":
		return nil, d.startProducer(r)
	case "send":
		return d.send(r)
	case "send_batch":
		return d.sendBatch(r)
	case "stream":
		return nil, d.stream(r)
	case "request":
		return d.request(r)
	case "start_consumer":
		return nil, d.startConsumer(r)
	case "stop":
		return nil, d.stopConsumer(r)
	case "pull":
		return d.pull(r)
	case "poll":
		return d.poll(r)
	case "create_topic":
		return nil, d.createTopic(r)
	default:
		return nil, fmt.Errorf("no such step: %s", r.Step)
	}
}

func (d *driver) close() {
	for _, p := range d.producers {
		_ = p.Shutdown()
	}
	for _, c := range d.consumers {
		_ = c.Shutdown()
	}
}
